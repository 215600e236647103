"""``ftd --check``: findings, lines and exit code, on the demo and on spoilt copies of it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from ftd import check
from ftd.check import (
    Severity,
    examine,
    http_findings,
    key_file_findings,
    limit_findings,
    report_lines,
    socket_findings,
)
from ftd.checkpoint.source import resolve
from ftd.cli import main
from ftd.config import Config, HttpAddress
from ftd.memory.machine import Machine, read_machine
from ftd.units import GiB, MiB

ROOMY = Machine(4, 64 * GiB, 60 * GiB, "the machine", (0,), "madvise")


@pytest.fixture
def config(tmp_path) -> Config:
    return Config(http=HttpAddress("127.0.0.1", 0), socket=tmp_path / "ftd.sock")


@pytest.fixture
def demo_copy(tmp_path) -> Path:
    return Path(shutil.copytree(resolve("demo").path, tmp_path / "copy"))


def texts(findings, severity=None) -> str:
    return "\n".join(str(f) for f in findings if severity in (None, f.severity))


def test_the_demo_would_start(config):
    report = examine(config, ROOMY)
    assert report.starts
    lines = "\n".join(report_lines(config, report))
    assert "qwen3_moe, experts in bf16" in lines
    assert "6, 6 of them with 32 experts, 4 for each token" in lines
    assert "98,304 B" in lines  # 3 matrices of 256 x 64 bfloat16
    assert "18,874,368 B" in lines  # 192 of them
    assert lines.endswith("ftd would start")


def test_only_settings_that_differ_are_shown_and_who_gave_them(config):
    config = replace(config, max_running=3, origin={"max_running": "FTD_MAX_RUNNING"})
    lines = list(report_lines(config, examine(config, ROOMY)))
    assert [line for line in lines if line.startswith("setting")] == [
        "setting       max_running = 3  (FTD_MAX_RUNNING)"
    ]


def test_no_weights_are_read(config, monkeypatch):
    def fail(*args):
        raise AssertionError("read")

    monkeypatch.setattr(os, "preadv", fail)
    assert examine(config, ROOMY).starts


def test_everything_wrong_is_found_at_once(config, demo_copy, tmp_path):
    (demo_copy / "model-00002-of-00002.safetensors").unlink()
    (demo_copy / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    bad = replace(
        config, model=str(demo_copy), cpu_isa="avx9", socket=tmp_path / "no" / "such" / "sock"
    )
    refused = texts(examine(bad, ROOMY).findings, Severity.REFUSED)
    assert "1 of 2 shards" in refused
    assert "--socket" in refused
    assert "chat template" in refused.lower() or "tokenizer_config.json" in refused
    if not check.library.unavailable_reason():
        assert "avx9" in refused


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "/no/such/dir"}, "model /no/such/dir: there is no such directory"),
        ({"context": 100_000}, "--context 100000: the model was trained for at most 4096 tokens"),
        ({"kv_tokens": 10**8}, "tokens of KV need"),
        ({"tool_dialect": "klingon"}, "--tool-dialect: there is none of the name 'klingon'"),
        ({"anchor_dir": Path("/proc/x")}, "/proc/x cannot hold anchors"),
    ],
)
def test_what_would_refuse_the_start(config, change, said):
    report = examine(replace(config, **change), ROOMY)
    assert not report.starts
    assert said in texts(report.findings, Severity.REFUSED)


def test_a_model_that_is_not_downloaded_yet_is_no_hindrance(config, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        config = replace(config, model="someone/absent")
        report = examine(config, ROOMY)
        assert report.starts is not offline
        said = list(report_lines(config, report))
        if offline:
            assert "HF_HUB_OFFLINE is set" in texts(report.findings, Severity.REFUSED)
            assert said[-1] == "ftd would not start"
        else:
            assert "not checked: model someone/absent: not downloaded yet" in texts(report.findings)
            assert "ftd downloads it when it starts" in texts(report.findings, Severity.NOTE)
            assert said[-1] == "ftd would start to download the model, and then check it"


def test_a_folder_for_anchors_is_tried_and_not_made(config, tmp_path):
    for path in (tmp_path / "new" / "anchors", tmp_path):
        assert examine(replace(config, anchor_dir=path), ROOMY).starts
    assert list(tmp_path.iterdir()) == []


def test_an_unsupported_model_is_refused_with_those_supported(config, demo_copy):
    content = json.loads((demo_copy / "config.json").read_text()) | {"model_type": "llama"}
    (demo_copy / "config.json").write_text(json.dumps(content))
    report = examine(replace(config, model=str(demo_copy)), ROOMY)
    assert "'llama'" in texts(report.findings)
    assert "qwen3_moe" in texts(report.findings)
    for file in demo_copy.glob("*.safetensors*"):
        file.unlink()  # whatever form its weights have
    assert "'llama'" in texts(examine(replace(config, model=str(demo_copy)), ROOMY).findings)


def test_too_little_memory_is_refused_with_both_numbers(config):
    report = examine(config, replace(ROOMY, available_bytes=100 * MiB, limited_by="memory.max"))
    assert not report.starts
    assert "100 MiB is available, limited by memory.max" in texts(report.findings)


def test_tight_memory_and_a_shorter_context_are_told(config):
    need = examine(replace(config, kv_tokens=1024), ROOMY).prepared.plan.total_bytes
    machine = replace(ROOMY, available_bytes=need + MiB)
    report = examine(replace(config, kv_tokens=1024), machine)
    assert report.starts
    assert "memory is tight: the plan leaves 1.00 MiB" in texts(report.findings, Severity.WARNING)
    assert "context is 1,024 tokens, the model was trained for 4,096" in texts(report.findings)


def test_a_missing_chat_template_is_told(config, demo_copy):
    file = demo_copy / "tokenizer_config.json"
    content = json.loads(file.read_text())
    del content["chat_template"]
    file.write_text(json.dumps(content))
    report = examine(replace(config, model=str(demo_copy)), ROOMY)
    assert report.starts
    assert "has no chat template" in texts(report.findings, Severity.WARNING)


def test_missing_kernels_are_told_once_with_the_cost(config, monkeypatch):
    monkeypatch.setattr(check.library, "unavailable_reason", lambda: "not built")
    report = examine(config, ROOMY)
    assert report.starts
    assert texts(report.findings).count("not built") == 1
    assert "third of the speed" in texts(report.findings)


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = HttpAddress("127.0.0.1", server.getsockname()[1])
        (finding,) = http_findings(address, has_key=False)
    assert finding.severity is Severity.NOTE and finding.taken
    assert f"--http {address}: the port is taken" in finding.text
    assert "--http start a second one" in finding.hint
    assert "ftctl check MODEL" in finding.hint
    assert list(http_findings(address, has_key=False)) == []  # and is free again


def test_a_check_runs_beside_an_ftd_that_serves(config):
    with socket.create_server(("127.0.0.1", 0)) as server:
        report = examine(replace(config, http=HttpAddress(*server.getsockname())), ROOMY)
        assert report.starts
        assert report.verdict == "ftd would start, once what is taken is free"
        assert list(report_lines(config, report))[-1] == report.verdict
    assert examine(config, ROOMY).verdict == "ftd would start"


def test_a_host_that_is_not_here_and_one_open_to_all():
    refused = list(http_findings(HttpAddress("192.0.2.1", 0), has_key=True))
    assert "cannot listen" in texts(refused, Severity.REFUSED)
    open_to_all = list(http_findings(HttpAddress("0.0.0.0", 0), has_key=False))
    assert "without a key" in texts(open_to_all, Severity.WARNING)
    assert list(http_findings(HttpAddress("0.0.0.0", 0), has_key=True)) == []


def test_places_for_the_socket(tmp_path):
    assert list(socket_findings(tmp_path / "ftd.sock")) == []
    assert list(socket_findings(tmp_path / "made" / "ftd.sock")) == []
    assert "no folder" in texts(socket_findings(tmp_path / "a" / "b" / "ftd.sock"))
    (tmp_path / "file").write_text("x")
    assert "not a socket" in texts(socket_findings(tmp_path / "file"))
    path = tmp_path / "live.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        assert "another ftd listens there" in texts(socket_findings(path), Severity.NOTE)
    assert list(socket_findings(path)) == []  # left behind: ftd takes it over


def test_key_files(tmp_path):
    file = tmp_path / "keys"
    assert list(key_file_findings(None)) == []
    assert "cannot be read: No such file" in texts(key_file_findings(file))
    file.write_text("# none yet\n\n")
    assert "holds no key" in texts(key_file_findings(file), Severity.REFUSED)
    file.write_text("secret\n")
    file.chmod(0o644)
    said = texts(key_file_findings(file), Severity.WARNING)
    assert "other users may read" in said
    assert "secret" not in said
    file.chmod(0o600)
    assert list(key_file_findings(file)) == []


def test_limits_of_the_machine():
    assert list(limit_findings(ROOMY, 1024)) == []
    assert "huge pages are off" in texts(limit_findings(replace(ROOMY, huge_pages="never"), 4096))
    assert "256 file descriptors" in texts(limit_findings(ROOMY, 256))


def test_the_command_prints_to_stdout_and_exits_0_or_1(tmp_path, log_as_before):
    flags = ["--check", "--http", "127.0.0.1:0", "--socket", str(tmp_path / "s")]
    good = CliRunner().invoke(main, flags)
    if read_machine().available_bytes > GiB:
        assert good.exit_code == 0, good.output
        assert good.stdout.startswith("ftd ")  # and no line of the log stands before it
        assert good.stdout.endswith("ftd would start\n")
    bad = CliRunner().invoke(main, [*flags, "--model", "/no/such/dir"])
    assert bad.exit_code == 1
    assert "refused: model /no/such/dir" in bad.stdout


def test_formats_are_reported_for_each_kind_of_module(config, data_dir):
    config = replace(config, model=str(data_dir / "oracles" / "qwen3_moe-nvfp4-ct"))
    report = examine(config, ROOMY)
    lines = "\n".join(report_lines(config, report))
    assert "qwen3_moe, experts in nvfp4" in lines
    assert "nvfp4 layers  self_attn.k_proj x2" in lines
    assert "bf16 layers   lm_head, mlp.gate x2, model.embed_tokens" in lines


@pytest.mark.parametrize("family", ["gpt_oss-mxfp4", "qwen3_next", "qwen3_moe-nvfp4"])
def test_a_check_gets_by_without_torch(family):
    model = Path(__file__).parents[1] / "data" / "oracles" / family
    code = (
        "import sys; from ftd.cli import main\n"
        f"arguments = ['--check', '--device', 'cpu', '--model', {str(model)!r}]\n"
        "try: main([*arguments, '--http', '127.0.0.1:0'])\n"
        "except SystemExit as end: code = end.code\n"
        "sys.exit(code or 3 * ('torch._C' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ftd would start" in done.stdout
