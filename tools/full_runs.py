"""What ``bench_full.py`` measures of one ftd: how it started, and each row of the table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import bench_rows as rows
from bench_http import BenchFailed
from bench_roofline import Rates, Weights, least_step_s
from bench_rows import PREFIX_TOKENS
from bench_server import Event, Prompts, Server, Started, with_server
from full_table import COLD, Run
from full_work import Work

from ftd.control.client import Client, ControlError
from ftd.control.protocol import Budget, Profile, Reload

SCORED = 4  # prompts whose answers are compared over a reload
SILENCE_S = 120.0  # of ftd while it changes its budget or its model


class Phases:
    """How long each part of a start took, from the events of its log."""

    ENDS: ClassVar = {
        "daemon.started": "to the port", "model.checked": "headers", "weights.read": "weights",
        "kernels.compiled": "up to compiled kernels", "gpu.ready": "GPU", "engine.loaded": "rest",
    }  # fmt: skip

    def __init__(self, say: Callable[[str], None], at: str) -> None:
        self._say, self._at, self._last_s = say, at, time.perf_counter()
        self._before: float | None = None
        self.seconds: dict[str, float] = {}

    def told(self, event: Event) -> None:
        """By the clock of the log; what is before its first event, by our own."""
        phase, now_s = self.ENDS.get(event.get("event", "")), event.get("mono_s")
        if phase is None or now_s is None:
            return
        before = time.perf_counter() - self._last_s
        self.seconds[phase] = before if self._before is None else now_s - self._before
        self._before = now_s
        for part in ("pin_s", "fill_s", "capture_s"):
            if part in event:
                self.seconds[f"of it {part[:-2]}"] = event[part]
        self._say(f"{self._at}: {phase} {self.seconds[phase]:.1f} s")

    def __str__(self) -> str:
        return ", ".join(f"{phase} {s:.1f}" for phase, s in self.seconds.items())


class Runs:
    """What is measured of one ftd that runs."""

    def __init__(
        self,
        work: Work,
        name: str,
        path: Path,
        started: Started,
        weights: Weights,
        runs: Sequence[Run],
    ) -> None:
        self.work, self.o, self.results = work, work.o, work.results
        self.name, self.path, self.started = name, path, started
        self.weights, self.runs = weights, runs
        self.prompts = Prompts(weights.vocab - 3, self.o.seed)
        self.profile: str | None = None

    async def __call__(self, server: Server) -> None:
        for n, run in enumerate(self.runs):
            at = f"{self.name}.{run.name}"
            if not self.work.has_time(at):
                continue
            async with self.noted(at):
                if n:
                    await self.change_budget(at, run.vram)
                await self.measure(server, at, full=run.threads is None)
        to = self.o.reload.get(self.name)
        if to and self.runs[0].threads is None and self.work.has_time(f"{self.name}.reload"):
            async with self.noted(f"{self.name}.reload"):
                await self.reload(server, to)

    @asynccontextmanager
    async def noted(self, at: str) -> AsyncIterator[None]:
        """What fails, or takes longer than the limit, costs this alone."""
        try:
            async with asyncio.timeout(self.work.left_s):
                yield
        except (BenchFailed, ControlError, TimeoutError) as error:
            self.work.failed(at, error)

    async def call(self, command: Any) -> Any:
        def run() -> Any:
            with Client(self.started.socket, SILENCE_S) as client:
                return client.call(command)

        return await asyncio.to_thread(run)

    async def change_budget(self, at: str, vram: str) -> None:
        done = await self.call(Budget(vram=vram))
        said = {k: getattr(done, k) for k in ("slots", "slots_were", "paused_ms")}
        self.results.note(f"{at}.budget", said)
        self.work.say(f"{at}: {said}")

    async def measure(self, server: Server, at: str, *, full: bool) -> None:
        """All values of one run, the most wanted first."""
        o, p, results = self.o, self.prompts, self.results
        sizes = (o.prompt_tokens, o.output_tokens)
        await rows.warm_up(server, p, *sizes, o.prompt_tokens)
        if self.profile is None and not o.no_profile:
            await self.take_profile(at)
        results.add(f"{at}.decode", await rows.decode(server, p, *sizes, o.repeats))
        step = next(iter(await rows.counted(server, p, *sizes)), {})
        results.note(f"{at}.step", step)
        results.note(f"{at}.slots", int(step.get("slots", 0)))
        self.compare(at, step)
        self.work.say(f"{at}: decode {results.values[f'{at}.decode']}, step {step}")
        if not full:
            return
        results.add(
            f"{at}.append64",
            await rows.append(server, p, 64, o.repeats, PREFIX_TOKENS // o.shorter),
        )
        for key, tokens in COLD.items():
            repeats = 1 if tokens > 20_000 else o.repeats
            results.add(f"{at}.{key}", await rows.cold(server, p, tokens // o.shorter, repeats))
            self.work.say(f"{at}: {key} {results.values[f'{at}.{key}']} ms")

    async def take_profile(self, at: str) -> None:
        found = await self.call(Profile())
        self.profile = Path(found.path).read_text()
        self.results.note(f"{at}.profile", self.profile)
        self.work.say(f"{at}: profile taken in {found.took_s:.1f} s")

    def compare(self, at: str, step: dict[str, float]) -> None:
        """With the roofline, and with what the simulator says for these slots."""
        if not step:
            return
        rates = Rates.of_gigabytes(*self.o.rates)
        if self.profile:
            predicted, rates = predict(self.profile, self.weights, int(step["slots"]), rates.hbm)
            self.results.note(f"{at}.predicted", predicted)
        least_s = least_step_s(self.weights, step, rates)
        self.results.add(f"{at}.roofline", [100 * least_s / step["step_s"]])

    async def reload(self, server: Server, to: str) -> None:
        """To a model of another family and back; answers before and after are compared.

        Beside that: the same answers twice without a reload, since residency moves meanwhile.
        """
        path, _ = await asyncio.to_thread(self.work.prepare, to, 2)
        scored = [self.prompts.new(48) for _ in range(SCORED)]
        before, again = [await rows.answers(server, scored) for _ in range(2)]
        there = await self.call(Reload(model=str(path)))
        self.work.say(f"{self.name}: reloaded as {there}")
        other = await with_server(self.started.url, _decode_some)
        back = await self.call(Reload(model=str(self.path)))
        self.work.say(f"{self.name}: reloaded as {back}; {other} tokens between")
        after = await rows.answers(server, scored)
        self.results.note(
            f"{self.name}.reload",
            {
                "to": to,
                "there_s": there.load_s,
                "back_s": back.load_s,
                "decoded": sum(len(tokens) for tokens in before["tokens"]),
                "over": rows.agreement(before, after, far=0.25),
                "without": rows.agreement(before, again, far=0.25),
            },
        )


async def _decode_some(server: Server) -> int:
    return (await server.ask(range(100, 140), 16)).output_tokens


def predict(
    profile: str, weights: Weights, slots: int, hbm: float
) -> tuple[dict[str, float], Rates]:
    """What the simulator says for the measured machine, and its rates for the roofline."""
    from ftd.experts.profile import from_json
    from ftd.experts.simulator import simulate, steps_of, synthetic_routing

    found = from_json(profile)
    experts = weights.num_experts // weights.layers
    routing = synthetic_routing(400, weights.layers, experts, weights.experts_per_token)
    machine = found.machine("measured")
    outcome = simulate(
        steps_of(routing, experts, 1), "default", machine,
        num_slots=slots, expert_bytes=found.expert_bytes,
    )  # fmt: skip
    link = machine.link_bytes_per_s
    return asdict(outcome), Rates(link, found.read_bytes_per_s or machine.dram_bytes_per_s, hbm)
