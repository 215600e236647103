"""ftctl anchors and ftctl verify over a real socket, engine and demo model."""

import asyncio
import json
import threading
from types import SimpleNamespace

import orjson
import pytest
from click.testing import CliRunner

from ftctl import view
from ftctl.cli import main
from ftd.checkpoint.source import resolve
from ftd.config import load_config
from ftd.control.commands import LifecycleCommands
from ftd.control.protocol import AnchorsResult
from ftd.control.server import ControlServer
from ftd.engine.api import EngineRequest, Sampling
from ftd.engine.loading import load_engine
from ftd.engine.preparing import prepare
from ftd.kv.anchors import Anchor, AnchorInfo, AnchorKind
from ftd.text.textmodel import TextModel

SHORT = {
    "tools": [],
    "sessions": [
        {
            "name": "short",
            "about": "an answer, then a retry with another message",
            "messages": [
                {"role": "user", "content": "Say {{20 words}}."},
                {"role": "assistant", "content": "One."},
                {"role": "user", "content": "More."},
                {"role": "user", "content": "Less."},
            ],
            "requests": [[0], [0, 1, 2], [0, 1, 3]],
        }
    ],
}


class Daemon:
    """The control socket in front of an engine, on a thread with a loop of its own."""

    def __init__(self, path):
        self.path = path
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()))
        self.thread.start()
        assert self.ready.wait(60)

    async def serve(self):
        self.loop, self.ended = asyncio.get_running_loop(), asyncio.Event()
        config = load_config({"device": "cpu", "dtype": "float32", "kv_tokens": "2048"}, {})
        source = resolve("demo")
        loaded = load_engine(config, prepare(source.path, config), lambda *_: None, lambda: False)
        model = SimpleNamespace(name="demo", engine=loaded.handle, text=TextModel(source.path))
        lifecycle = SimpleNamespace(
            model=model, current=lambda: model, progress=None, state="ready", config=config
        )
        server = ControlServer(self.path, LifecycleCommands(lifecycle, stop=self.ended.set))
        self.engine = loaded.handle
        await server.start()
        self.ready.set()
        await self.ended.wait()
        await server.close()
        await loaded.handle.close()

    def ask(self, name, ids, anchors, session):
        async def ask():
            request = EngineRequest(
                name, tuple(ids), 4, Sampling(temperature=0.0), anchors=anchors, session=session
            )
            return [output async for output in self.engine.submit(request)]

        return asyncio.run_coroutine_threadsafe(ask(), self.loop).result(60)

    def end(self):
        self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join(30)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    daemon = Daemon(tmp_path_factory.mktemp("ftd") / "ftd.sock")
    yield daemon
    daemon.end()


def ftctl(daemon, *words):
    done = CliRunner().invoke(main, ["--socket", str(daemon.path), *map(str, words)])
    return done.exit_code, done.output


def listed(daemon, *words):
    code, output = ftctl(daemon, "anchors", "--json", *words)
    assert code == 0, output
    return json.loads(output)["anchors"]


def test_anchors_are_listed_dumped_and_dropped(daemon, tmp_path):
    shared = range(100, 150)
    for name, more in (("one", range(200, 230)), ("two", range(300, 340))):
        anchors = (Anchor(50, AnchorKind.SYSTEM), Anchor(60, AnchorKind.USER))
        first, *_ = daemon.ask(name, [*shared, *more], anchors, name)
    assert (first.reused_tokens, str(first.resumed.ended)) == (
        50,
        "other tokens follow here in what is known",
    )
    assert first.resumed.anchor == Anchor(50, AnchorKind.SYSTEM)
    found = {(a["session"], a["kind"], a["position"]): a for a in listed(daemon)}
    assert found["two", "system", 50]["hits"] == 1
    assert found["two", "system", 50]["saved_s"] >= 0  # two short chunks: measured, or too close
    assert {("one", "user", 60), ("two", "user", 60), ("one", "turn", 83)} <= found.keys()
    token_bytes = 6 * 2 * 2 * 64 * 4  # layers, keys and values, heads, their size, float32
    assert found["one", "turn", 83]["kv_bytes"] == 23 * token_bytes
    status = daemon.engine.status()
    held_bytes = status.pages_held * status.page_tokens * token_bytes
    assert 0 < sum(a["kv_bytes"] for a in found.values()) <= held_bytes
    dump = tmp_path / "anchors.json"
    code, output = ftctl(daemon, "anchors", "--session", "one", "--dump", dump)
    assert code == 0 and "kind" in output.splitlines()[0]
    dumped = orjson.loads(dump.read_bytes())["anchors"]
    assert {(a["session"], a["position"]) for a in dumped} == {("one", 60), ("one", 83)}
    code, output = ftctl(daemon, "anchors", "--drop", "--session", "one")
    assert code == 0 and "pages freed" in output
    assert {a["session"] for a in listed(daemon)} == {"two"}
    assert listed(daemon, "--drop") == []


def test_of_many_anchors_people_see_those_used_last():
    infos = tuple(AnchorInfo("s", "turn", n, 1, age_s=float(n)) for n in range(60))
    result = AnchorsResult("m", infos)
    _, *rows, more = view.anchors(result, view.Paint(False), most=50)
    assert [int(row.split()[2]) for row in rows] == list(range(50))
    assert more == "... and 10 more, not used as lately (--json shows all)"
    assert len(view.anchors(result, view.Paint(False))) == 61


def test_verify_replays_and_compares_and_leaves_nothing(daemon, tmp_path):
    before, status_before = listed(daemon), daemon.engine.status()
    path = tmp_path / "short.json"
    path.write_bytes(orjson.dumps(SHORT))
    code, output = ftctl(daemon, "verify", "--sessions", path)
    assert code == 0, output
    assert output.splitlines()[-1] == "answers of demo are equal"
    code, output = ftctl(daemon, "verify", "--json", "--sessions", path)
    (session,) = json.loads(output.splitlines()[-1])["sessions"]
    assert (session["requests"], session["unequal"]) == (3, 0)
    assert session["recomputed_tokens"] <= session["ideal_tokens"] + 16
    assert len(listed(daemon)) == len(before)
    status = daemon.engine.status()
    assert status.pages_held == status_before.pages_held
    assert status.anchors.hits == status_before.anchors.hits
    assert status.anchors.count == len(before)


def test_verify_refuses_what_is_no_recording(daemon, tmp_path):
    path = tmp_path / "none.json"
    path.write_text("{}")
    code, output = ftctl(daemon, "verify", "--sessions", path)
    assert code == 1 and "holds no recorded sessions" in output
