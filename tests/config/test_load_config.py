"""Precedence of flags, variables, file and defaults, and every message a wrong one causes."""

from pathlib import Path

import pytest

from ftd.config import (
    Config,
    FaultSpec,
    HttpAddress,
    default_profile_dir,
    default_socket,
    load_config,
    settings,
)
from ftd.errors import ConfigError
from ftd.units import Amount


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "ftd.toml"
    path.write_text(text)
    return str(path)


def refusal(flags=None, env=None) -> str:
    with pytest.raises(ConfigError) as e:
        load_config(flags or {}, env or {})
    return str(e.value)


def test_without_anything_all_is_default():
    config = load_config({}, {})
    assert config.model == "demo"
    assert config.http == HttpAddress("127.0.0.1", 1919)
    assert list(config.changed()) == []
    assert config == Config(socket=Path("/run/ftd/ftd.sock"), profile_dir=default_profile_dir({}))


def test_flag_beats_variable_beats_file_beats_default(tmp_path):
    file = write(tmp_path, 'max_running = 2\nmax_waiting = 2\nheartbeat = "2s"\n')
    env = {"FTD_MAX_RUNNING": "3", "FTD_MAX_WAITING": "3"}
    config = load_config({"config": file, "max_running": "4"}, env)
    assert (config.max_running, config.max_waiting, config.heartbeat) == (4, 3, 2.0)
    assert config.drain_timeout == 30.0
    assert {name: where for name, _, where in config.changed()} == {
        "max_running": "--max-running",
        "max_waiting": "FTD_MAX_WAITING",
        "heartbeat": f"{file}: heartbeat",
    }


def test_every_setting_has_the_same_name_everywhere(tmp_path):
    """A value for each kind of setting, given in the three ways, gives three equal configs."""
    typed = {
        "model": '"dir"', "served_name": '["a", "b"]', "http": '"0.0.0.0:80"',
        "socket": '"/tmp/s"', "device": '"cpu"', "dtype": '"float32"', "context": "2048",
        "kv_tokens": "4096", "vram": '"90%"', "expert_slots": "5", "cpu_threads": "3",
        "cpu_isa": '"avx2"', "prefill_chunk": "128", "max_running": "2", "max_waiting": "9",
        "drain_timeout": '"9s"', "heartbeat": '"1s"', "body_limit": '"1M"',
        "api_key_file": '"/tmp/k"', "allowed_hosts": '["h"]', "allow_origin": '["https://o"]',
        "load_threads": "2", "log_level": '"debug"', "log_format": '"json"',
        "log_prompts": "true", "fault": '"step:3,load:1,slow:50ms"', "hold": '"20s"',
        "thinking": '"off"', "drop_billing_line": "false", "tool_dialect": '"hermes"',
        "anchor_dir": '"/tmp/a"', "anchor_bytes": '"2M"', "idle_unload": '"10m"',
        "host_kv": '"3G"', "profile_dir": '"/tmp/p"',
    }  # fmt: skip
    assert set(typed) == {f.name for f in settings()}
    text = {k: v.strip("[]").replace('"', "").replace(", ", ",") for k, v in typed.items()}
    flags = dict(text) | {"served_name": ("a", "b"), "log_prompts": True}
    flags |= {"drop_billing_line": False}
    by_file = load_config(
        {"config": write(tmp_path, "".join(f"{k} = {v}\n" for k, v in typed.items()))}, {}
    )
    by_env = load_config({}, {"FTD_" + k.upper(): v for k, v in text.items()})
    assert load_config(flags, {}) == by_file == by_env
    assert by_file.vram == Amount(percent=90)
    assert load_config({"vram": "auto"}, {}).vram == "auto"
    assert load_config({}, {"FTD_VRAM": "auto"}).vram == "auto"
    assert by_file.fault == FaultSpec(step=3, load=1, slow_s=0.05)
    assert len(list(by_env.changed())) == len(typed)


def test_file_keys_may_be_spelled_like_flags_but_only_once(tmp_path):
    assert load_config({"config": write(tmp_path, "max-running = 3")}, {}).max_running == 3
    file = write(tmp_path, "max-running = 3\nmax_running = 4")
    assert "the same setting" in refusal({"config": file})


def test_the_config_file_can_be_named_by_a_variable(tmp_path):
    env = {"FTD_CONFIG": write(tmp_path, "max_running = 3")}
    assert load_config({}, env).max_running == 3


def test_token_counts_take_k():
    assert load_config({"context": "32K", "kv_tokens": "1M"}, {}).context == 32768


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"FTD_SOCKET": "/a/b", "XDG_RUNTIME_DIR": "/run/user/1"}, "/a/b"),
        ({"XDG_RUNTIME_DIR": "/run/user/1"}, "/run/user/1/ftd.sock"),
        ({}, "/run/ftd/ftd.sock"),
    ],
)
def test_default_socket(environ, path):
    assert default_socket(environ) == Path(path)
    assert load_config({}, environ).socket == Path(path)


def test_profiles_lie_in_the_users_cache():
    assert default_profile_dir({"XDG_CACHE_HOME": "/c"}) == Path("/c/ftd/profiles")
    assert load_config({}, {}).profile_dir == Path("~/.cache/ftd/profiles").expanduser()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"max_running": "0"}, "--max-running: expected a whole number from 1 to 1024, found '0'"),
        ({"max_running": "two"}, "found 'two'"),
        ({"max_running": "1.5"}, "found '1.5'"),
        ({"context": "-1"}, "--context: expected a whole number from 16 to 16777216, or auto"),
        ({"context": "64GB"}, "found '64GB'"),
        ({"http": "1919"}, "--http: expected HOST:PORT such as 127.0.0.1:1919"),
        ({"http": "localhost:70000"}, "found 'localhost:70000'"),
        ({"http": "::1:80"}, "found '::1:80'"),
        ({"device": "tpu"}, "--device: expected auto, cpu, cuda or cuda:N, found 'tpu'"),
        ({"device": "cuda:x"}, "found 'cuda:x'"),
        ({"dtype": "int8"}, "expected one of auto, bfloat16, float32, found 'int8'"),
        ({"vram": "6X"}, "--vram: expected a size such as 512M, 6G"),
        ({"vram": "110%"}, "expected a percentage above 0% and up to 100%, found '110%'"),
        ({"heartbeat": "0"}, "--heartbeat: expected from 100 ms to 1 h, found 0 ms"),
        ({"heartbeat": "soon"}, "expected a duration such as 50ms, 5s"),
        ({"body_limit": "10"}, "expected from 1.00 KiB to 1.00 GiB, found 10 B"),
        ({"model": " "}, "--model: expected a text that is not empty, found ' '"),
        ({"socket": "/" + "x" * 107}, "expected a path of at most 107 bytes, found 108 bytes"),
        ({"config": "/dev/zero"}, "--config /dev/zero: cannot be read: it has more than 1.00 MiB"),
        ({"fault": "step:0"}, "--fault: expected step:N, memory:N, gpu:N, load:N, stuck:N or"),
        ({"fault": "crash"}, "found 'crash'"),
        ({"context": "4096", "kv_tokens": "1024"}, "--context 4096 contradicts --kv-tokens 1024"),
        ({"allow_origin": ("a.example",)}, "an origin such as https://chat.example:8080"),
        ({"allow_origin": ("https://a.example/app",)}, "found 'https://a.example/app'"),
        ({"allowed_hosts": ("http://a.example",)}, "a name such as gpu.example"),
        ({"allowed_hosts": ("a.example:80",)}, "found 'a.example:80'"),
        ({"allow_origin": ("*", "https://a")}, "--allow-origin: * allows every origin"),
        ({"config": "/nowhere/ftd.toml"}, "/nowhere/ftd.toml: cannot be read: No such file"),
    ],
)
def test_a_wrong_flag_is_named_with_what_was_found_and_what_is_allowed(flags, said):
    assert said in refusal(flags)


def test_a_contradiction_names_who_gave_each_number(tmp_path):
    file = write(tmp_path, "kv_tokens = 1024")
    said = refusal({"config": file}, {"FTD_CONTEXT": "4096"})
    assert f"FTD_CONTEXT = 4096 contradicts {file}: kv_tokens = 1024" in said
    assert "raise --kv-tokens to at least 4096, or lower --context to at most 1024" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_runing = 3", "unknown key 'max_runing' (did you mean max_running?)"),
        ("[server]\nport = 1", "unknown key 'server'"),
        ('max_running = "3"', "max_running: expected a whole number from 1 to 1024, found '3'"),
        ("max_running = true", "found the switch true"),
        ("max_running = 3.0", "found 3.0"),
        ("max_running = [3]", "found a list"),
        ("http = {port = 1}", "found a table"),
        ("log_prompts = 1", "log_prompts: expected true or false, found 1"),
        ('log_prompts = "yes"', "found 'yes'"),
        ("served_name = 3", "expected a list; each a text that is not empty, found 3"),
        ("served_name = [3]", "expected a text that is not empty, found 3"),
        ("heartbeat = true", "expected a duration"),
        ("model = ", "not valid TOML"),
    ],
)
def test_a_wrong_file_entry_is_named_with_file_and_key(tmp_path, text, said):
    file = write(tmp_path, text)
    message = refusal({"config": file})
    assert file in message
    assert said in message


def test_wrong_variables():
    assert "FTD_MAX_RUNNING: expected a whole number" in refusal(env={"FTD_MAX_RUNNING": "x"})
    said = refusal(env={"FTD_MAXRUNNING": "3"})
    assert said == "FTD_MAXRUNNING: unknown variable (did you mean FTD_MAX_RUNNING?)"
    assert "FTD_LOG_PROMPTS: expected true or false" in refusal(env={"FTD_LOG_PROMPTS": "maybe"})


def test_variables_that_are_empty_or_of_kubernetes_are_passed_over():
    env = {
        "FTD_API_KEY_FILE": "",
        "FTD_SERVICE_HOST": "10.0.0.1",
        "FTD_PORT": "tcp://10.0.0.1:1919",
        "FTD_PORT_1919_TCP_ADDR": "10.0.0.1",
    }
    assert list(load_config({}, env).changed()) == []


def test_the_config_cannot_be_changed():
    with pytest.raises(AttributeError):
        Config().max_running = 3  # type: ignore[misc]
