"""What the table of clients says, from what ftd logs; no client is needed here."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import run_agents
from agent_clients import CLIENTS
from agent_runs import FIRST, SECOND, Run

from ftctl.agents import AGENTS


def request(prompt, tokens, reused=0, **more):
    facts = {"prompts": [prompt], "prompt_tokens": tokens, "reused_tokens": reused}
    return {**facts, "status": 200, "outcome": "stop", "ttft_ms": 5.0, **more}


@pytest.fixture
def run(tmp_path):
    run = Run("opencode", "chat", None, tmp_path, "/bin")
    run.work.mkdir()
    (run.work / "hello.txt").write_text("hello\n")
    return run


def seen(run, *requests):
    return run_agents.judge(run, list(requests), "1.2.3")


def test_same_clients_as_launch():
    assert CLIENTS.keys() == AGENTS.keys()


def test_a_whole_run(run):
    first = f"system tools S82 {FIRST}"
    found = seen(
        run,
        request(f"title? {FIRST}", 100, outcome="cancelled", status=499),
        request(first, 900, ttft_ms=70.0),
        request(first + " call result", 1000, 900),
        request(first + f" call result done S10 {SECOND}", 1100, 990),
    )
    assert found.good and found.turns == 2 and found.requests == 4 and found.errors == 0
    assert (found.shared, found.reuse, found.ttft_ms) == (1.0, 0.99, (70.0, 5.0))
    (line,) = run_agents.table([found])
    assert line.startswith("| opencode | 1.2.3 | chat | yes | 2 | 4 | 0 | 1,000 | 100.0% | 99.0% |")


def test_a_prompt_that_the_client_rewrote(run):
    found = seen(run, request("abcdefgh", 100), request(f"abcdXfgh S10 {SECOND}", 120, 48))
    assert (found.shared, found.reuse) == (0.5, 0.48)


def test_failures_are_told(run):
    (run.work / "hello.txt").unlink()
    found = seen(run, request("x", 10, status=400, outcome="context_length_exceeded"))
    assert not found.good and (found.hello, found.turns, found.errors) == (False, 0, 1)
    assert run_agents.table([found])[0].count("|") == run_agents.HEAD.count("|")
    assert seen(run).requests == 0


def test_docs_keep_the_rows_of_clients_that_did_not_run(run, tmp_path):
    doc = tmp_path / "agents.md"
    doc.write_text(f"# Agents\n{run_agents.BEGIN}\n{run_agents.END}\nrest\n")
    one = seen(run, request("x", 10))
    other = dataclasses.replace(one, name="claude")
    run_agents.write_docs(doc, run_agents.table([one, other]))
    run_agents.write_docs(doc, run_agents.table([dataclasses.replace(one, version="2")]))
    text = doc.read_text()
    rows = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| ")][2:]
    assert rows == [["| Claude Code", "1.2.3"], ["| opencode", "2"]]
    assert text.startswith("# Agents\n") and text.endswith("\nrest\n")


def test_a_client_that_cannot_be_installed_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(run_agents, "_run", lambda *_, **__: None)
    with pytest.raises(run_agents.Unavailable, match="brought no"):
        run_agents.install("aider", tmp_path)
    monkeypatch.undo()
    with pytest.raises(run_agents.Unavailable, match="no such thing"):
        run_agents._run([sys.executable, "-c", "raise SystemExit('no such thing')"])
