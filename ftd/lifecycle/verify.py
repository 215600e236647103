"""Replay recorded sessions of agents: what is reused must change nothing, and all that can be is.

Every request is asked as a client would, then again from cold: its tokens are scored with reuse
turned off, so the same engine tells what each of them should have been. At every border and one
token to either side a prompt ends and is answered, to show pages copied in part at their worst.
The sessions (``ftd/demo/sessions.json``) are made up, in the shapes in which agents change what
they have sent before.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import stat
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from ftd.engine.api import EngineHandle, EngineRequest, Output, Sampling
from ftd.errors import ConfigError, EngineFailed, NotReady
from ftd.kv.anchors import Anchor
from ftd.text.conversation import Conversation, Tool
from ftd.text.messages import normalise
from ftd.text.textmodel import TextModel
from ftd.units import format_bytes

SESSIONS = Path(__file__).parent.parent / "demo" / "sessions.json"
MOST_BYTES = 64 * 2**20  # of a file of sessions
ANSWER_TOKENS = 6
_TOP = 2  # logprobs compared: a greedy choice and what came next
_WORDS = (  # of made up texts
    "the a of and to in is it for on with as at by this that file folder line word test code name "
    "value list path error result open read write change first last new old same other next small"
)
_FILL = re.compile(r"\{\{(\d+) ([^}]*)\}\}")
_SESSION = "ftctl verify"  # of all its requests: what they leave is found by it
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Session:
    name: str
    about: str
    requests: Sequence[Conversation]


@dataclass(slots=True)
class Verified:
    """One session's outcome."""

    session: str
    requests: int = 0
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    ideal_tokens: int = 0  # behind the last border that an earlier prompt or answer shares
    most_above_ideal: int = 0  # of a single request
    checked: int = 0  # answers compared
    unequal: int = 0  # greedy tokens that differ from a cold run's beyond the tolerance
    max_difference: float = 0.0  # of a logprob
    _known: list[Sequence[int]] = field(default_factory=list)


def read_sessions(path: Path = SESSIONS) -> list[Session]:
    """Recorded sessions. Raises ConfigError."""
    try:
        recorded = orjson.loads(_content(path))
        tools = [
            Tool(t["function"]["name"], t["function"]["parameters"], t) for t in recorded["tools"]
        ]
        return [_session(entry, tools) for entry in recorded["sessions"]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no recorded sessions: {error!r}", hint="see ftd/demo/sessions.json"
        ) from error


def _content(path: Path) -> bytes:
    """Of a plain file of sensible size: devices and pipes may never end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} is no plain file, so no recorded sessions are read from it")
    if found.st_size > MOST_BYTES:
        raise ConfigError(
            f"{path} has {format_bytes(found.st_size)}, recorded sessions at most "
            f"{format_bytes(MOST_BYTES)}"
        )
    return path.read_bytes()


async def verify(
    engine: EngineHandle, text: TextModel, sessions: Iterable[Session], *, tolerance: float = 0.0
) -> AsyncIterator[Verified]:
    """Replay one session after the other; yields what came of each, and forgets what it left.

    Args:
        tolerance: of a logprob; 0 in float32 on the CPU device, where all is equal bit for bit.
    """
    prompts = [(session.name, await _prompts(engine, text, session)) for session in sessions]
    for name, each in prompts:
        done = Verified(name)
        try:
            for ids in each:
                anchors = await asyncio.to_thread(text.anchors, ids)
                await replay(engine, done, ids, anchors, tolerance)
        finally:
            with suppress(NotReady):  # the engine has failed: nothing is left in it
                await engine.at_safe_point(lambda core: core.drop_anchors(_SESSION))
        yield done


async def _prompts(engine: EngineHandle, text: TextModel, session: Session) -> list[list[int]]:
    """Of one session. Raises ConfigError: this model cannot hold one of them."""
    run, limits = next(_numbers), engine.limits
    room = min(limits.context_tokens, limits.pool_tokens) - ANSWER_TOKENS - 1
    prompts = []
    for conversation in session.requests:
        rendered = await asyncio.to_thread(text.prompt, _of_run(conversation, run))
        prompts.append(list(rendered.ids))
        if len(prompts[-1]) > room:
            raise ConfigError(
                f"session {session.name!r} has a prompt of {len(prompts[-1])} tokens, "
                f"{room} is the most that can be answered now",
                hint=f"{limits.raised_by} raises the limit" if limits.raised_by else "",
            )
    return prompts


async def replay(
    engine: EngineHandle,
    done: Verified,
    ids: list[int],
    anchors: Sequence[Anchor],
    tolerance: float = 0.0,
) -> None:
    """Ask one prompt of a session, and compare; what comes of it is added to ``done``."""
    answer = await _ask(engine, ids, ANSWER_TOKENS, anchors)
    shared = max((_common(ids, known) for known in done._known), default=0)
    border = max((a.position for a in anchors if a.position <= shared), default=0)
    ideal, recomputed = len(ids) - border, len(ids) - answer.reused
    done.requests += 1
    done.prompt_tokens += len(ids)
    done.ideal_tokens += ideal
    done.recomputed_tokens += recomputed
    done.most_above_ideal = max(done.most_above_ideal, recomputed - ideal)
    whole = ids + answer.tokens
    done._known.append(whole)
    cold = await _score(engine, whole)
    _compare(done, cold, len(ids), answer, tolerance)
    for place in sorted({a.position + by for a in anchors for by in (-1, 0, 1)}):
        if 0 < place < len(ids) and place > border:
            short = await _ask(engine, ids[:place], 1, ())
            _compare(done, cold, place, short, tolerance)


@dataclass(slots=True)
class _Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, float]] = field(default_factory=list)
    reused: int = 0


async def _ask(
    engine: EngineHandle, ids: Sequence[int], tokens: int, anchors: Sequence[Anchor]
) -> _Answer:
    answer = _Answer()
    sampling = Sampling(temperature=0.0, logprobs=_TOP)
    request = EngineRequest(
        _name(),
        tuple(ids),
        tokens,
        sampling,
        anchors=tuple(anchors),
        session=_SESSION,
        passing=True,
    )
    async for output in engine.submit(request):
        _raise_failure(output)
        answer.tokens += output.tokens
        answer.logprobs += [dict(lp.top) for lp in output.logprobs]
        answer.reused = output.reused_tokens or answer.reused
    return answer


async def _score(engine: EngineHandle, ids: Sequence[int]) -> list[Mapping[int, float]]:
    """From cold: the best tokens at each place and their logprobs."""
    scores: list[Mapping[int, float]] = []
    sampling = Sampling(temperature=0.0)
    request = EngineRequest(
        _name(),
        tuple(ids),
        1,
        sampling,
        prompt_logprobs=_TOP,
        session=_SESSION,
        passing=True,
    )
    async for output in engine.submit(request):
        _raise_failure(output)
        if output.prompt_logprobs:
            scores = [dict(lp.top) if lp else {} for lp in output.prompt_logprobs]
    return scores


def _compare(
    done: Verified,
    cold: Sequence[Mapping[int, float]],
    begin: int,
    answer: _Answer,
    tolerance: float,
) -> None:
    """An answer that began behind ``begin`` tokens, with what a cold run says of the same place."""
    for place, (token, warm) in enumerate(
        zip(answer.tokens, answer.logprobs, strict=True), start=begin
    ):
        if place >= len(cold):
            return
        expected = cold[place]
        best = max(expected, key=lambda t: expected[t])
        done.checked += 1
        shared = warm.keys() & expected.keys()
        differ = max((abs(warm[t] - expected[t]) for t in shared), default=float("inf"))
        done.max_difference = max(done.max_difference, differ)
        margin = expected[best] - expected.get(token, float("-inf"))
        done.unequal += (token != best and margin > 2 * tolerance) or differ > tolerance


def _session(entry: Mapping[str, Any], tools: Sequence[Tool]) -> Session:
    messages = [{**m, "content": _filled(m["content"])} for m in entry["messages"]]
    bare = entry.get("without_tools", ())
    requests = [
        Conversation(normalise([messages[i] for i in numbers]), () if n in bare else tools)
        for n, numbers in enumerate(entry["requests"])
    ]
    return Session(entry["name"], entry["about"], requests)


def _of_run(conversation: Conversation, run: int) -> Conversation:
    """With a system prompt that no earlier session has begun with."""
    first, *rest = conversation.messages
    return replace(
        conversation, messages=[{**first, "content": f"Run {run}.\n{first['content']}"}, *rest]
    )


def _filled(content: str) -> str:
    """``{{12 seed}}`` stands for twelve words, always the same ones."""

    def words(match: re.Match[str]) -> str:
        return " ".join(random.Random(match[2]).choices(_WORDS.split(), k=int(match[1])))

    return _FILL.sub(words, content)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _name() -> str:
    return f"verify-{next(_numbers)}"


def _raise_failure(output: Output) -> None:
    if output.error is not None:
        raise EngineFailed(f"a request of the replay failed: {output.error}") from output.error
