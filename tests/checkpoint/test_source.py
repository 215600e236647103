from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from ftd.checkpoint.source import NotDownloaded, resolve
from ftd.errors import ModelNotFound, UnsupportedModel

HUB_ID = "Qwen/Qwen3-30B-A3B"


def test_the_demo_comes_with_the_package():
    source = resolve("demo")
    assert source.name == "demo"
    assert (source.path / "config.json").is_file()


def test_a_directory_is_served_under_its_name(maker, monkeypatch):
    maker.write()
    assert resolve(str(maker.path)).name == "model"
    monkeypatch.chdir(maker.path)
    assert resolve(".").name == "model"


def test_a_directory_wins_over_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / HUB_ID).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve(HUB_ID).name == "Qwen3-30B-A3B"


@pytest.mark.parametrize("name", ["nowhere", "/no/where", "./nowhere", "a/b/c", "~/nowhere"])
def test_what_is_neither_directory_nor_hub_id_is_refused(name):
    with pytest.raises(ModelNotFound, match="there is no such directory") as e:
        resolve(name)
    assert name in e.value.message
    assert "OWNER/NAME" in e.value.hint


def test_a_file_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match="this is a file, not a directory"):
        resolve(str(tmp_path / "model.gguf"))


def resolve_in_child(home, **env) -> str:
    """What resolving a hub id prints where HF_HOME is ``home``: the hub reads it on import."""
    code = (
        "from ftd.checkpoint.source import resolve\n"
        f"try:\n print(resolve('{HUB_ID}'))\n"
        "except Exception as e:\n print(type(e).__name__, e)"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | {"HF_HOME": str(home)} | env, text=True,
        capture_output=True, check=True, timeout=60,
    ).stdout  # fmt: skip


def put_into_cache(home, maker):
    """The layout of the hub's cache: refs/main names the snapshot."""
    repo = home / "hub" / "models--Qwen--Qwen3-30B-A3B"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "snapshots").mkdir()
    maker.path = repo / "snapshots" / ("a" * 40)
    return maker.write()


def test_offline_names_the_id_and_the_cache_looked_in(tmp_path):
    said = resolve_in_child(tmp_path, HF_HUB_OFFLINE="1")
    assert said.startswith(f"ModelNotFound model {HUB_ID}: the hub cannot be reached")
    assert "HF_HUB_OFFLINE is set" in said
    assert str(tmp_path / "hub") in said


def test_unreachable_names_the_id_and_the_cache_looked_in(tmp_path):
    said = resolve_in_child(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert f"model {HUB_ID}: the hub cannot be reached" in said
    assert str(tmp_path / "hub") in said


def test_a_complete_copy_in_the_cache_needs_no_network(tmp_path, maker):
    snapshot = put_into_cache(tmp_path, maker)
    said = resolve_in_child(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert HUB_ID in said
    assert str(snapshot) in said
    (snapshot / "model-00002-of-00003.safetensors").unlink()
    said = resolve_in_child(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "no complete copy in the cache" in said


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub whose download does what a test says; nothing is in the cache."""
    calls = []

    def serve(answer):
        def snapshot_download(model, *, allow_patterns, local_files_only=False, **options):
            if local_files_only:
                raise errors.LocalEntryNotFoundError("not cached")
            calls.append((allow_patterns, options))
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    return serve


class ConnectError(Exception):
    """As HTTP libraries raise it: of no class that we know."""


def http_error(kind):
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    return kind("refused", response=response)


@pytest.mark.parametrize(
    ("error", "said", "hint"),
    [
        (http_error(errors.RepositoryNotFoundError), "the hub knows no such model", "spelling"),
        (http_error(errors.GatedRepoError), "conditions accepted", "hf auth login"),
        (errors.HFValidationError("bad id"), "not a valid hub id: bad id", "OWNER/NAME"),
        (OSError(28, "No space left on device"), "the download failed: No space left", "the disk"),
        (ConnectError("name or service not known"), "cannot be reached (name or", "network"),
        (http_error(errors.HfHubHTTPError), "cannot be reached (refused", "network"),
    ],
)
def test_what_the_hub_refuses_is_told_in_our_words(hub, error, said, hint):
    hub(error)
    with pytest.raises(ModelNotFound) as e:
        resolve(HUB_ID)
    assert f"model {HUB_ID}" in e.value.message
    assert said in e.value.message
    assert "the cache" in e.value.message
    assert hint in e.value.hint


def test_the_small_files_are_judged_before_weights_are_downloaded(hub, tmp_path):
    calls = hub(tmp_path)

    def accept(path):
        assert path == tmp_path
        raise UnsupportedModel("not this one")

    with pytest.raises(UnsupportedModel, match="not this one"):
        resolve(HUB_ID, accept=accept)
    assert [patterns for patterns, _ in calls] == [["*.json", "*.jinja"]]


def test_only_needed_files_are_downloaded_with_progress(hub, tmp_path):
    calls = hub(tmp_path)
    seen = []
    assert resolve(HUB_ID, progress=lambda *p: seen.append(p)).path == tmp_path
    patterns, options = calls[-1]
    assert patterns == ["*.json", "*.jinja", "*.safetensors"]
    assert options["ignore_patterns"] == ["*/*", "consolidated*"]
    for shown in (True, False):
        bar = options["tqdm_class"](total=100, unit="B", disable=not shown)
        bar.update(30)
        bar.update(70)
        assert seen == [(30, 100), (100, 100)]
        seen.clear()
    options["tqdm_class"](total=5, desc="files").update(1)
    assert seen == []


def test_a_check_does_not_download(hub):
    calls = hub(OSError("must not be asked"))
    with pytest.raises(NotDownloaded, match="no complete copy") as e:
        resolve(HUB_ID, download=False)
    assert f"hf download {HUB_ID}" in e.value.hint
    assert calls == []


def test_a_check_refuses_what_a_start_without_hub_would(hub, monkeypatch):
    hub(OSError("must not be asked"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE is set") as e:
        resolve(HUB_ID, download=False)
    assert not isinstance(e.value, NotDownloaded)
