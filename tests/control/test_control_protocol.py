import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.control import lines
from ftd.control import protocol as p
from ftd.engine.api import EngineLimits, EngineStatus, RequestInfo

EXAMPLES = [
    p.Status(),
    p.Health(),
    p.Watch(0.25),
    p.Requests(),
    p.Experts(),
    p.Anchors(drop=True, session="s"),
    p.Anchors(),
    p.Verify(0.01, "/tmp/sessions.json"),
    p.Cancel("chatcmpl-1"),
    p.Check("/models/b"),
    p.Check(),
    p.Reload("b", "cut", 3.5),
    p.Reload(),
    p.Budget("6G", "32K", "auto", auto=True),
    p.Trace(4096, 60.0),
    p.Drain(10.0),
    p.Profile(),
    p.Stop(),
]


def test_every_command_has_an_example_here():
    assert {p.entry_of(e).name for e in EXAMPLES} == set(p.COMMANDS)


@pytest.mark.parametrize("command", EXAMPLES, ids=lambda c: p.entry_of(c).name)
def test_command_survives_the_line(command):
    line = lines.encode_command(command)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert lines.decode_command(line) == command


def test_only_commands_that_change_nothing_run_at_any_time():
    at = {name: entry.at for name, entry in p.COMMANDS.items()}
    assert at["cancel"] is at["budget"] is at["anchors"] is p.At.SAFE_POINT
    beside = {n for n in at if at[n] is p.At.BESIDE}
    assert beside == {"check", "reload", "drain", "trace", "verify", "profile"}


def test_results_with_all_their_parts_survive_the_line():
    status = p.StatusResult(
        version="1",
        pid=3,
        uptime_s=1.0,
        state="ready",
        ready=True,
        cause=None,
        last_failure=None,
        model="a",
        path="/models/a",
        http="http://127.0.0.1:1919",
        rss_bytes=2**40,
        progress=p.Progress("reading weights", 1, 2),
        limits=EngineLimits(1, 2, 3, 4, 5),
        engine=EngineStatus(
            running=1, requests=(RequestInfo("r", "decode", 1, 1, 0, 4, 0.5),), step_ms_p50=1.5
        ),
    )
    line = lines.encode({"result": status})
    assert lines.build(p.StatusResult, lines.decode_object(line)["result"]) == status


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"", "not a line of JSON"),
        (b"\xff\xfe", "not a line of JSON"),
        (b"[1]", "a JSON object was expected, list found"),
        (b"{}", "unknown command None; known are anchors, budget, cancel"),
        (b'{"command": ["status"]}', "unknown command"),
        (b'{"command": "nix"}', "unknown command 'nix'"),
        (b'{"protocol": 2, "command": "status"}', "speaks protocol 1, the client 2"),
        (b'{"command": "cancel"}', "cancel: field 'request_id' is missing"),
        (b'{"command": "cancel", "request_id": 3}', "request_id: str expected, 3 found"),
        (b'{"command": "cancel", "request_id": null}', "request_id: str expected, None found"),
        (b'{"command": "reload", "how": "fast"}', "how: one of 'drain', 'cut' expected"),
        (b'{"command": "reload", "how": []}', "how: one of 'drain', 'cut' expected"),
        (b'{"command": "reload", "timeout_s": true}', "timeout_s: float expected, True found"),
        (b'{"command": "reload", "timeout_s": "5"}', "timeout_s: float expected, '5' found"),
        (b'{"command": "status", "x": 1}', "status: unknown field 'x'; known are none"),
    ],
)
def test_malformed_commands_are_refused_with_the_place(line, complaint):
    with pytest.raises(lines.Malformed) as refusal:
        lines.decode_command(line)
    assert complaint in str(refusal.value)


@given(st.binary(max_size=200))
def test_no_line_breaks_the_reader(line):
    with contextlib.suppress(lines.Malformed):
        lines.decode_command(line)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.sampled_from(sorted(p.COMMANDS)),
    st.dictionaries(
        st.sampled_from(["model", "how", "timeout_s", "request_id", "interval_s", "z"]), json_values
    ),
)
def test_no_field_of_any_type_breaks_the_reader(name, values):
    try:
        command = lines.decode_command(lines.encode({"command": name, **values}))
    except lines.Malformed:
        return
    assert isinstance(command, p.COMMANDS[name].command)


def test_clients_ignore_fields_of_a_newer_ftd():
    assert lines.build(p.StopResult, {"pid": 4, "news": [1]}) == p.StopResult(4)


def test_table_rows_are_frozen_dataclasses():
    for entry in p.COMMANDS.values():
        for cls in (entry.command, entry.result):
            assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen, cls
