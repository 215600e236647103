"""Many clients for many minutes: every answer right, every counter at rest, memory flat.

    python tools/soak.py --minutes 10 --clients 8 --budgets
    python tools/soak.py --model /models/x --minutes 2 -- --dtype float32 --cpu-threads 2
    python tools/soak.py --budgets --vram 3G -- --device cuda

Starts an ftd of its own, asks each question of a set of conversations once while nothing else runs,
and then lets clients hold these conversations all at once: shared system prompts, tool turns,
streams and plain replies, clients that leave in the middle, and with ``--budgets`` changes of the
KV pool and the slots every few seconds, now and then to ``--auto``. Greedy answers of the CPU
device in float32 do not depend on what runs beside, so each one is compared with the undisturbed
one, letter for letter.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from ftd.control.client import Client, ControlError, Refused
from ftd.control.protocol import Budget, Status, StatusResult
from ftd.units import format_bytes, format_count

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "tests/data/script-model"
# A pool that eight clients fill again and again, and what a budget may make of it and of the slots.
FLAGS = ("--context=2048", "--kv-tokens=4608", "--expert-slots=16", "--max-running=4")
KV_TOKENS, SLOTS = (2304, 4608, 9216), (0, 4, 16, 32)
FILLER = ("lorem", "ipsum", "dolor", "sit", "amet", "consectetur", "adipiscing", "elit", "sed")
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    },
}
SAMPLE_S = 0.25
BUDGET_S = 3.0  # between two changes
BY_NEED = 0.2  # of the changes: --auto, until the next one
REST_S = 10.0
MOST_GROWTH = 0.02  # of resident memory, from a fifth of the time to its end

Message = dict[str, Any]


@dataclass
class Question:
    """A request, and what its answer is when nothing else runs."""

    messages: list[Message]
    answer: Message | None = None

    def body(self, *, stream: bool) -> dict[str, Any]:
        return {
            "messages": self.messages,
            "temperature": 0,
            "max_tokens": 96,
            "tools": [TOOL],
            "stream": stream,
        }


@dataclass
class Tally:
    right: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)
    budgets: int = 0
    budgets_refused: int = 0
    paused_ms: list[float] = field(default_factory=list)
    samples: list[tuple[float, int]] = field(default_factory=list)  # seconds, RSS
    unbalanced: list[str] = field(default_factory=list)


def script_keys(model: Path) -> list[str]:
    """Words that make the script model say something long; other models get plain words."""
    file = model / "answers.json"
    if not file.exists():
        return ["Why", "How", "When", "What"]
    answers = orjson.loads(file.read_bytes())
    return sorted(key for key, answer in answers.items() if len(answer["answer"]) < 400)


def words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choice(FILLER) for _ in range(rng.randrange(most)))


class Soak:
    def __init__(self, base: str, socket: Path, args: argparse.Namespace) -> None:
        self.base, self.socket, self.args = base, socket, args
        self.tally = Tally()
        self.session: aiohttp.ClientSession
        self.conversations: list[list[Question]] = []
        self.end_s = 0.0

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=timeout) as self.session:
            await self.record()
            self.end_s = time.monotonic() + 60 * self.args.minutes
            async with asyncio.TaskGroup() as tasks:
                for number in range(self.args.clients):
                    tasks.create_task(self.client(random.Random(1000 * self.args.seed + number)))
                tasks.create_task(self.sample())
                if self.args.budgets:
                    tasks.create_task(self.change_budgets(random.Random(self.args.seed)))

    # ---- what is asked

    async def record(self) -> None:
        """Conversations whose turns have been answered one by one, with nothing beside."""
        rng, keys = random.Random(self.args.seed), script_keys(self.args.model)
        systems = [f"You are agent {i}. " + " ".join(FILLER * 16) for i in range(3)]
        for number in range(self.args.conversations):
            messages: list[Message] = [{"role": "system", "content": systems[number % 3]}]
            questions = []
            for turn in range(rng.randrange(1, 5)):
                text = f"{rng.choice(keys)} {words(rng, 40)}"
                messages = [*messages, {"role": "user", "content": text}]
                if rng.random() < 0.3:
                    messages = [*messages, *tool_turn(f"call_{number}_{turn}", words(rng, 60))]
                question = Question(messages)
                question.answer = await self.ask(question, stream=False)
                questions.append(question)
                assert question.answer is not None, "an undisturbed request was refused"
                said = {k: v for k, v in question.answer.items() if k != "finish_reason"}
                said.pop("tool_calls", None)  # a call would want its result
                messages = [*messages, {"role": "assistant", "content": "", **said}]
            self.conversations.append(questions)

    async def ask(self, question: Question, *, stream: bool) -> Message | None:
        """The answer, however it came; None: refused."""
        url, body = self.base + "/v1/chat/completions", question.body(stream=stream)
        async with self.session.post(url, json=body) as reply:
            if reply.status != 200:
                self.tally.refused[reply.status] += 1
                return None
            if not stream:
                return plain_answer((await reply.json())["choices"][0])
            return await streamed_answer(reply)

    async def leave(self, question: Question, after_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await self.ask(question, stream=True)
        self.tally.left += 1

    # ---- who asks, looks and changes

    async def client(self, rng: random.Random) -> None:
        while time.monotonic() < self.end_s:
            for question in rng.choice(self.conversations):
                if rng.random() < 0.15:
                    await self.leave(question, rng.uniform(0.01, 0.6))
                    break
                answer = await self.ask(question, stream=rng.random() < 0.5)
                if answer is None:
                    await asyncio.sleep(0.2)
                elif answer == question.answer:
                    self.tally.right += 1
                else:
                    told = orjson.dumps([question.messages[-1], question.answer, answer]).decode()
                    self.tally.wrong.append(told)
                if time.monotonic() > self.end_s:
                    return

    async def sample(self) -> None:
        began_s = time.monotonic()
        while time.monotonic() < self.end_s:
            status = await asyncio.to_thread(self.status)
            self.tally.samples.append((time.monotonic() - began_s, status.rss_bytes))
            self.tally.unbalanced += unbalanced(status)
            await asyncio.sleep(SAMPLE_S)

    async def change_budgets(self, rng: random.Random) -> None:
        while time.monotonic() < self.end_s:
            await asyncio.sleep(rng.uniform(0, 2 * BUDGET_S))
            tokens, slots = str(rng.choice(KV_TOKENS)), str(rng.choice(SLOTS))
            change = Budget(kv_tokens=tokens, expert_slots=slots)
            if rng.random() < BY_NEED:
                change = Budget(vram=self.args.vram, auto=True)
            try:
                done = await asyncio.to_thread(self.call, change)
            except Refused:  # a request under way is longer than the pool would be
                self.tally.budgets_refused += 1
            else:
                self.tally.budgets += 1
                self.tally.paused_ms.append(done.paused_ms)

    def call(self, command: Any) -> Any:
        with Client(self.socket, timeout_s=60) as ftd:
            return ftd.call(command)

    def status(self) -> StatusResult:
        found: StatusResult = self.call(Status())
        return found

    def at_rest(self) -> list[str]:
        """What is not at rest within ``REST_S`` of the last client's end."""
        give_up_s = time.monotonic() + REST_S
        while True:
            status = self.status()
            engine = status.engine
            assert engine is not None
            left = unbalanced(status)
            if engine.running or engine.waiting:
                left.append(f"{engine.running} running, {engine.waiting} waiting")
            if engine.pages_held != engine.pages_cached:
                left.append(f"{engine.pages_held - engine.pages_cached} pages held by nobody")
            if engine.window_pages_held:
                left.append(f"{engine.window_pages_held} pages of windows held by nobody")
            if engine.failed:
                left.append(f"{engine.failed} requests failed")
            if not left or time.monotonic() > give_up_s:
                return left
            time.sleep(0.1)


def tool_turn(call_id: str, result: str) -> list[Message]:
    call = {"name": "read_file", "arguments": '{"path": "notes.txt"}'}
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": result or "empty"},
    ]


def plain_answer(choice: dict[str, Any]) -> Message:
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return _answer(
        message.get("content") or "",
        message.get("reasoning_content") or "",
        calls,
        choice["finish_reason"],
    )


async def streamed_answer(reply: aiohttp.ClientResponse) -> Message | None:
    text, thinking, calls, finish = "", "", dict[int, dict[str, str]](), None
    async for line in reply.content:
        if not line.startswith(b"data: {"):
            continue
        event = orjson.loads(line[6:])
        if "error" in event:
            return None
        for choice in event["choices"]:
            delta, finish = choice["delta"], choice["finish_reason"] or finish
            text += delta.get("content") or ""
            thinking += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
                for name in call:
                    call[name] += part.get("function", {}).get(name) or ""
    return _answer(text, thinking, [calls[i] for i in sorted(calls)], finish)


def _answer(text: str, thinking: str, calls: list[Any], finish: str | None) -> Message:
    answer: Message = {"content": text, "finish_reason": finish}
    if thinking:
        answer["reasoning_content"] = thinking
    if calls:
        answer["tool_calls"] = [{"name": c["name"], "arguments": c["arguments"]} for c in calls]
    return answer


def unbalanced(status: StatusResult) -> list[str]:
    engine = status.engine
    if engine is None:
        return [f"no engine: {status.cause}"]
    found = []
    if engine.pages_free + engine.pages_held != engine.pages_total:
        found.append(f"{engine.pages_free} + {engine.pages_held} != {engine.pages_total} pages")
    if engine.slots_used > engine.slots_total:
        found.append(f"{engine.slots_used} of {engine.slots_total} slots used")
    return found


@contextlib.contextmanager
def running_ftd(model: Path, flags: list[str]) -> Iterator[tuple[str, Path]]:
    """(address, control socket) of an ftd that is ready."""
    with tempfile.TemporaryDirectory(prefix="ftd-soak-") as folder:
        socket, log = Path(folder) / "ftd.sock", Path(folder) / "log"
        command = [sys.executable, "-m", "ftd", f"--model={model}", "--http=127.0.0.1:0"]
        command += [f"--socket={socket}", "--log-level=warning", *flags]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink)
        try:
            while True:
                with contextlib.suppress(ControlError), Client(socket) as ftd:
                    status = ftd.call(Status())
                    if status.ready:
                        break
                if process.poll() is not None:
                    raise SystemExit(f"ftd did not start:\n{log.read_text()}")
                time.sleep(0.1)
            yield status.http, socket
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(30)
            sys.stderr.write(log.read_text())


def growth(samples: list[tuple[float, int]]) -> tuple[int, int, float]:
    """RSS early on and at the end, and the share by which it has grown.

    Budgets move it up and down: what is compared is the tenth that is lowest.
    """
    fifth = max(1, len(samples) // 5)
    early = sorted(rss for _, rss in samples[fifth : 2 * fifth] or samples)
    late = sorted(rss for _, rss in samples[-fifth:])
    before, after = early[len(early) // 10], late[len(late) // 10]
    return before, after, after / before - 1


def report(tally: Tally, left: list[str], minutes: float) -> bool:
    before, after, grown = growth(tally.samples)
    pauses = sorted(tally.paused_ms)
    rows = [
        ("answers right", format_count(tally.right)),
        ("answers wrong", format_count(len(tally.wrong))),
        ("clients left", format_count(tally.left)),
        ("requests refused", ", ".join(f"{n} x {s}" for s, n in tally.refused.items()) or "0"),
        ("budgets changed", f"{tally.budgets}, {tally.budgets_refused} refused"),
        ("counters off", str(len(tally.unbalanced))),
        ("not at rest", ", ".join(left) or "nothing"),
        ("resident", f"{format_bytes(before)} -> {format_bytes(after)} ({grown:+.1%})"),
    ]
    if pauses:
        middle = f"median {pauses[len(pauses) // 2]:.2f} ms, most {pauses[-1]:.2f} ms"
        rows.insert(5, ("pauses", middle))
    print(f"{minutes:g} minutes, {len(tally.samples)} samples")
    for name, text in rows:
        print(f"{name:18}{text}")
    for line in [*tally.wrong[:3], *tally.unbalanced[:3]]:
        print(line)
    good = tally.right and not (tally.wrong or tally.unbalanced or left)
    return bool(good) and grown < MOST_GROWTH


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budgets", action="store_true", help="change pool and slots meanwhile")
    parser.add_argument("--vram", default="24M", help="that is divided by need at times")
    parser.add_argument("flags", nargs="*", help="further flags of ftd, behind --")
    args = parser.parse_args()
    flags = ["--device=cpu", "--dtype=float32", *FLAGS, *args.flags]
    with running_ftd(args.model, flags) as (base, socket):
        soak = Soak(base, socket, args)
        asyncio.run(soak.run())
        good = report(soak.tally, soak.at_rest(), args.minutes)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
