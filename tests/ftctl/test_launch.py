"""What ``ftctl launch`` would do, from plain facts; tests/field starts a client for real."""

import json
import stat
import tomllib

import pytest

from ftctl import launch
from ftctl.agents import AGENTS, KEY_VARIABLE, Server
from ftd.control.client import Refused
from ftd.control.protocol import StatusResult
from ftd.engine.api import EngineLimits

SERVER = Server("http://127.0.0.1:1919", "org/Some-MoE", 131_072, "local")
CASES = [(name, api) for name, agent in AGENTS.items() for api in agent.apis]
CLOUD = {
    "ANTHROPIC_API_KEY": "sk-1",
    "ANTHROPIC_AUTH_TOKEN": "sk-2",
    "ANTHROPIC_BASE_URL": "https://cloud",
    "ANTHROPIC_CUSTOM_HEADERS": "x: y",
    "CLAUDE_CODE_OAUTH_TOKEN": "sk-3",
    "CLAUDE_CODE_USE_BEDROCK": "yes",
    "OPENAI_API_KEY": "sk-4",
    "OPENAI_BASE_URL": "https://cloud",
    "OPENROUTER_API_KEY": "sk-5",
    "GEMINI_API_KEY": "sk-6",
    "AWS_BEARER_TOKEN_BEDROCK": "sk-7",
    "DEEPSEEK_API_KEY": "sk-8",
    KEY_VARIABLE: "sk-9",
}
OTHERS = {"EDITOR": "vi", "GITHUB_TOKEN": "t", "AWS_ACCESS_KEY_ID": "a", "STRIPE_API_KEY": "s"}


@pytest.fixture
def environ(tmp_path):
    """All clients are installed, and HOME is empty."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name in AGENTS:
        (binaries / name).write_text("#!/bin/sh\n")
        (binaries / name).chmod(0o755)
    return {"HOME": str(tmp_path / "home"), "PATH": str(binaries), **OTHERS}


def refused(*args):
    with pytest.raises(Refused) as caught:
        launch.plan(*args)
    return caught.value.error


@pytest.mark.parametrize(("name", "api"), CASES)
def test_every_client_is_told_where_whom_and_how_long(environ, name, api):
    planned = launch.plan(AGENTS[name], api, SERVER, ("say", "hi"), environ)
    told = json.dumps([planned.facts()["set"], planned.command, [c.text for c in planned.changes]])
    assert "127.0.0.1:1919" in told and "org/Some-MoE" in told
    assert "131072" in told or name == "mini"  # which has no window
    assert planned.command[0].endswith(f"/{name}") and planned.command[-2:] == ("say", "hi")


@pytest.mark.parametrize(("name", "api"), CASES)
def test_no_key_and_address_of_a_cloud_gets_to_a_client(environ, name, api):
    planned = launch.plan(AGENTS[name], api, SERVER, (), {**environ, **CLOUD})
    child = planned.environ({**environ, **CLOUD})
    assert not [k for k, v in child.items() if v in CLOUD.values()]
    assert {k: child[k] for k in OTHERS} == OTHERS
    assert all(name in CLOUD for name in planned.cleared)


@pytest.mark.parametrize("name", AGENTS)
def test_a_context_that_is_too_small_is_refused_with_both_numbers(environ, name):
    need = AGENTS[name].min_context_tokens
    for tokens in (4096, need - 1):  # the demo model's
        small = Server(SERVER.root, "demo", tokens, "local")
        error = refused(AGENTS[name], None, small, (), environ)
        assert error.code == "context_too_small"
        assert error.hint == "serve a model with a larger context"
        assert f"{need:,} tokens" in error.message and f"demo has {tokens:,}" in error.message
        longer = Server(SERVER.root, "demo", tokens, "local", trained_tokens=need)
        assert "raise --context" in refused(AGENTS[name], None, longer, (), environ).hint
    launch.plan(AGENTS[name], None, Server(SERVER.root, "m", need, "local"), (), environ)


@pytest.mark.parametrize("name", AGENTS)
def test_an_absent_client_is_planned_and_refused_with_what_to_install(environ, name):
    planned = launch.plan(AGENTS[name], None, SERVER, (), {**environ, "PATH": "/nowhere"})
    assert f"would run {name}" in planned.lines()[-2]
    assert f"install it with: {AGENTS[name].install}" in planned.lines()[-1]
    with pytest.raises(Refused) as caught:
        planned.check_installed()
    assert caught.value.error.code == "client_missing"
    assert AGENTS[name].install in caught.value.error.hint


def test_an_api_that_a_client_does_not_speak_is_refused(environ):
    error = refused(AGENTS["claude"], "chat", SERVER, (), environ)
    assert "does not speak chat; it speaks messages" in error.message


class TestFiles:
    def test_written_once_with_a_backup_of_what_was_there(self, environ, tmp_path):
        file = tmp_path / "home" / ".codex" / "config.toml"
        file.parent.mkdir(parents=True)
        file.write_text('model = "gpt-5"\n')
        file.chmod(0o640)
        (line,) = launch.apply(launch.plan(AGENTS["codex"], None, SERVER, (), environ))
        told = tomllib.loads(file.read_text())
        assert told["model"] == "gpt-5"
        assert told["model_providers"]["ftd"]["base_url"] == "http://127.0.0.1:1919/v1"
        (backup,) = file.parent.glob("*.bak")
        assert backup.read_text() == 'model = "gpt-5"\n' and str(backup) in line
        assert stat.S_IMODE(file.stat().st_mode) == 0o640
        assert launch.plan(AGENTS["codex"], None, SERVER, (), environ).changes == ()

    @pytest.mark.parametrize(("name", "api"), CASES)
    def test_second_launch_writes_nothing(self, environ, name, api):
        launch.apply(launch.plan(AGENTS[name], api, SERVER, (), environ))
        assert launch.plan(AGENTS[name], api, SERVER, (), environ).changes == ()

    def test_new_files_are_for_their_owner_only(self, environ):
        planned = launch.plan(AGENTS["pi"], None, SERVER, (), environ)
        launch.apply(planned)
        assert stat.S_IMODE(planned.changes[0].path.stat().st_mode) == 0o600

    def test_a_folder_of_the_client_s_own_variable(self, environ, tmp_path):
        environ["CODEX_HOME"] = str(tmp_path / "elsewhere")
        (change,) = launch.plan(AGENTS["codex"], None, SERVER, (), environ).changes
        assert change.path == tmp_path / "elsewhere" / "config.toml"

    def test_links_stay_links(self, environ, tmp_path):
        real = tmp_path / "dotfiles.json"
        real.write_text("{}")
        link = tmp_path / "home" / ".pi" / "agent" / "models.json"
        link.parent.mkdir(parents=True)
        link.symlink_to(real)
        launch.apply(launch.plan(AGENTS["pi"], None, SERVER, (), environ))
        assert link.is_symlink() and "ftd" in real.read_text()

    def test_a_file_that_cannot_be_read_is_left_alone(self, environ, tmp_path):
        file = tmp_path / "home" / ".pi" / "agent" / "models.json"
        file.parent.mkdir(parents=True)
        file.write_text("{broken")
        error = refused(AGENTS["pi"], None, SERVER, (), environ)
        assert error.code == "config_unreadable" and str(file) in error.message
        assert file.read_text() == "{broken" and len(list(file.parent.iterdir())) == 1

    def test_claude_gets_its_settings_by_name(self, environ, tmp_path):
        planned = launch.plan(AGENTS["claude"], None, SERVER, ("-p", "x"), environ)
        file = tmp_path / "home" / ".claude" / "ftd.json"
        assert planned.command[1:] == ("--settings", str(file), "-p", "x")
        (change,) = planned.changes
        assert json.loads(change.text)["env"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "131072"


def test_a_real_key_is_used_and_never_shown(environ):
    server = Server(SERVER.root, SERVER.model, SERVER.context_tokens, "sk-very-secret")
    for name, api in CASES:
        planned = launch.plan(AGENTS[name], api, server, (), environ)
        used = json.dumps([dict(planned.set), [c.text for c in planned.changes]])
        assert "sk-very-secret" in used, name
        assert "sk-very-secret" not in " ".join(planned.command)  # others can list processes
        assert "sk-very-secret" not in json.dumps(planned.facts()) + "".join(planned.lines())


def test_a_proxy_is_told_to_leave_this_machine_alone(environ):
    planned = launch.plan(AGENTS["pi"], None, SERVER, (), environ)
    assert "NO_PROXY" not in planned.set
    environ |= {"https_proxy": "http://proxy:3128", "no_proxy": "intra"}
    planned = launch.plan(AGENTS["pi"], None, SERVER, (), environ)
    assert planned.set["NO_PROXY"] == planned.set["no_proxy"] == "intra,localhost,127.0.0.1"


def test_openclaw_without_arguments_opens_its_chat(environ):
    assert launch.plan(AGENTS["openclaw"], None, SERVER, (), environ).command[1:] == ("chat",)
    named = launch.plan(AGENTS["openclaw"], None, SERVER, ("agent",), environ)
    assert named.command[1:] == ("agent",)


class TestServer:
    STATUS = StatusResult(
        version="1",
        pid=1,
        uptime_s=1.0,
        state="ready",
        ready=True,
        cause=None,
        last_failure=None,
        model="m",
        path="/m",
        http="http://127.0.0.1:1919",
        rss_bytes=1,
        limits=EngineLimits(40_000, 30_000, 4, 8, 100),
    )

    def of(self, **changes):
        facts = {f: getattr(self.STATUS, f) for f in StatusResult.__slots__}
        return launch.server_of(StatusResult(**{**facts, **changes}))

    def test_the_context_is_what_the_pool_can_hold(self):
        assert self.of() == Server("http://127.0.0.1:1919", "m", 30_000, "local")

    @pytest.mark.parametrize(
        ("bound", "root"),
        [
            ("http://0.0.0.0:8000", "http://127.0.0.1:8000"),
            ("http://[::]:8000", "http://[::1]:8000"),
            ("http://[::1]:8000", "http://[::1]:8000"),
            ("http://box.lan:8000", "http://box.lan:8000"),
        ],
    )
    def test_an_address_a_client_can_reach(self, bound, root):
        assert self.of(http=bound).root == root

    def test_the_first_key_of_the_file(self, tmp_path):
        file = tmp_path / "keys"
        file.write_text("# keys\n\n  sk-1 \nsk-2\n")
        assert self.of(api_key_file=str(file)).key == "sk-1"
        with pytest.raises(Refused, match="keys of ftd"):
            self.of(api_key_file=str(tmp_path / "none"))

    def test_no_model_no_launch(self):
        with pytest.raises(Refused, match="serves no model: it is failed, shard 2 is missing"):
            self.of(model=None, limits=None, state="failed", cause="shard 2 is missing")
