"""Drive an EngineCore step by step, without thread or loop."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ftd.config import load_config
from ftd.engine.api import EngineRequest, Finish, Output, Sampling, TokenLogprob
from ftd.engine.core import EngineCore
from ftd.engine.loading import load_core
from ftd.engine.preparing import prepare


@contextmanager
def engine_core(path: Path, num_pages: int | None = None, **settings: object):
    """A core on a checkpoint; ``num_pages`` shrinks the KV pool below what a plan would give."""
    flags = {name: str(value) for name, value in settings.items()}
    config = load_config({"model": str(path), "device": "cpu", "dtype": "float32", **flags}, {})
    prepared = prepare(path, config)
    if num_pages:
        prepared = replace(prepared, plan=replace(prepared.plan, num_pages=num_pages))
    core = load_core(config, prepared)
    try:
        yield core
    finally:
        core.close()


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    reused: int | None = None
    finish: Finish | None = None
    error: Exception | None = None

    def take(self, output: Output) -> None:
        assert self.finish is None, output
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        if output.reused_tokens is not None:
            assert self.reused is None
            self.reused, self.prompt_logprobs = output.reused_tokens, output.prompt_logprobs
        self.finish, self.error = output.finish, output.error


def request(
    name: str, prompt: Iterable[int], max_tokens: int = 16, **fields: object
) -> EngineRequest:
    sampling = fields.pop("sampling", Sampling(temperature=0.0))
    return EngineRequest(name, tuple(prompt), max_tokens, sampling, **fields)


def answer_all(
    core: EngineCore,
    requests: Iterable[EngineRequest],
    *,
    arrive: Mapping[str, int] | None = None,  # step before which a request comes; default 0
    leave: Mapping[str, int] | None = None,  # step before which its client goes
    most_steps: int = 10_000,
) -> dict[str, Answer]:
    """Run until nothing is left; pages and states are accounted for after every step."""
    arrive, leave = dict(arrive or {}), dict(leave or {})
    todo = list(requests)
    answers = {r.request_id: Answer() for r in todo}
    for step in range(most_steps):
        for r in [r for r in todo if arrive.get(r.request_id, 0) <= step]:
            core.add(r)
            todo.remove(r)
        for name in [n for n, when in leave.items() if when <= step]:
            if answers[name].finish is None:
                core.end(name)
            del leave[name]
        if core.has_work():
            for output in core.step():
                answers[output.request_id].take(output)
        elif not todo:
            break
        check_pages(core)
    else:
        raise AssertionError(f"not over after {most_steps} steps: {core.status()}")
    status = core.status()
    assert status.running == status.waiting == 0
    assert status.pages_held == status.pages_cached, "pages are held by nobody's request"
    assert status.window_pages_held == 0, status
    return answers


def comparable(answers: Mapping[str, Answer]) -> dict[str, tuple]:
    return {n: (a.tokens, a.logprobs, a.finish, a.error) for n, a in answers.items()}


def tokens_of(found: Mapping[str, tuple]) -> dict[str, list[int]]:
    """Of what ``comparable`` tells: on a GPU log-probabilities are equal but for rounding."""
    return {name: answer[0] for name, answer in found.items()}


def check_tokens_cold_and_resumed(
    core: EngineCore,
    requests: Iterable[EngineRequest],
    alone: Mapping[str, tuple],  # as of ``answer_alone``
    least_reused: int,  # the second time, of all requests together
) -> None:
    requests = tuple(requests)
    assert tokens_of(comparable(answer_all(core, requests))) == tokens_of(alone)
    again = answer_all(core, requests)
    assert tokens_of(comparable(again)) == tokens_of(alone)
    assert sum(answer.reused for answer in again.values()) > least_reused


def answer_alone(path: Path, requests: Iterable[EngineRequest]) -> dict[str, tuple]:
    """Each request by itself on an engine whose cache is empty."""
    found: dict[str, tuple] = {}
    with engine_core(path, max_running=1, prefill_chunk=256) as core:
        for one in requests:
            core.tree.clear()
            found |= comparable(answer_all(core, [one]))
    return found


def answer_interrupted(
    core: EngineCore, requests: Iterable[EngineRequest], seed: int
) -> dict[str, Answer]:
    """All at once, with a fifth of the looks at a layer border giving the step up."""

    class Stop(Exception):
        pass

    def interrupt() -> None:
        if rng.random() < 0.2:
            raise Stop

    rng = random.Random(seed)
    core.beat = interrupt
    answers: dict[str, Answer] = {}
    for one in requests:
        answers[one.request_id] = Answer()
        core.add(one)
    while core.has_work():
        try:
            outputs = core.step()
        except Stop:
            continue
        for output in outputs:
            answers[output.request_id].take(output)
    return answers


def check_pages(core: EngineCore) -> None:
    status = core.status()
    assert status.pages_free + status.pages_held == status.pages_total, status
    assert status.states_free + status.states_held == status.states_total, status
