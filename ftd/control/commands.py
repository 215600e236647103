"""What each command does; what it is called and what it brings stands in ``protocol``."""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from ftd import __version__
from ftd.config import flag, settings
from ftd.control import protocol as p
from ftd.control.traffic import between
from ftd.engine.api import EngineStatus
from ftd.errors import ConfigError, NotReady, RequestInvalid
from ftd.lifecycle import Lifecycle
from ftd.lifecycle.served import BudgetDone, How, State
from ftd.lifecycle.verify import SESSIONS, Verified, read_sessions, verify
from ftd.memory.change import Change


class LifecycleCommands:
    """Commands over a lifecycle.

    Args:
        stop: asks the daemon to end; returns at once.
    """

    def __init__(self, lifecycle: Lifecycle, *, stop: Callable[[], None]) -> None:
        self.http = ""  # the address listened on, once it is known
        self.api_key_file: Path | None = None
        self._lifecycle = lifecycle
        self._stop = stop
        self._began_s = time.monotonic()
        self._recorded: tuple[int, int] | None = None  # bytes, of a trace under way
        self._measured: p.Progress | None = None  # of a profile under way
        self._replaying = 0  # session of a verification under way

    async def run(self, command: p.Command[Any]) -> Any:
        """Raises FtdError: the command is refused, and nothing has changed unless it says so."""
        match command:
            case p.Status():
                return self._status()
            case p.Health():
                return self._health()
            case p.Requests():
                return self._requests()
            case p.Experts():
                return self._experts()
            case p.Anchors(drop, session):
                return await self._anchors(drop, session)
            case p.Verify(tolerance, sessions):
                return await self._verify(tolerance, sessions)
            case p.Cancel(request_id):
                return self._cancel(request_id)
            case p.Check("") | p.Reload(""):
                raise RequestInvalid("the model's name is empty", param="model")
            case p.Check(model):
                return await self._check(model)
            case p.Reload(model, how, timeout_s):
                return await self._reload(model, How(how), timeout_s)
            case p.Budget():
                return await self._budget(command)
            case p.Drain(timeout_s):
                return await self._drain(timeout_s)
            case p.Trace(tokens, timeout_s):
                return await self._trace(tokens, self._bounded_s(timeout_s))
            case p.Profile():
                return await self._profile()
            case p.Stop():
                self._stop()
                return p.StopResult(os.getpid())
        raise AssertionError(command)

    async def stream(self, command: p.Command[Any]) -> AsyncGenerator[p.StatusResult, None]:
        assert isinstance(command, p.Watch), command
        shortest, longest = p.INTERVAL_S
        if not shortest <= command.interval_s <= longest:
            raise RequestInvalid(
                f"interval_s is {command.interval_s:g}, {shortest:g} to {longest:g} s are possible",
                param="interval_s",
            )
        before: tuple[EngineStatus, float] | None = None
        while True:
            event, at_s = self._status(with_requests=True), time.monotonic()
            if before and event.engine and (model := self._lifecycle.model):
                seconds = at_s - before[1]
                traffic = between(before[0], event.engine, seconds, model.memory.reads)
                event = replace(event, traffic=traffic)
            before = (event.engine, at_s) if event.engine else None
            yield event
            model = None  # a stream must not keep a model alive
            await asyncio.sleep(command.interval_s)

    def progress(self) -> p.Progress:
        progress, model = self._lifecycle.progress, self._lifecycle.model
        engine = model.engine.status() if model else None
        phase = str(progress.phase if progress else self._lifecycle.state)
        done, total = (progress.done_bytes, progress.total_bytes) if progress else (0, 0)
        if self._recorded and not progress:
            phase, (done, total) = "recording the routing", self._recorded
        if self._replaying and not progress:
            phase = f"replaying session {self._replaying}"
        if self._measured and not progress:
            return self._measured
        return p.Progress(
            phase=phase,
            done_bytes=done,
            total_bytes=total,
            running=engine.running if engine else 0,
            waiting=engine.waiting if engine else 0,
        )

    def _status(self, *, with_requests: bool = False) -> p.StatusResult:
        lifecycle, model = self._lifecycle, self._lifecycle.model
        health, engine = lifecycle.health(), model.engine.status() if model else None
        return p.StatusResult(
            version=__version__,
            pid=os.getpid(),
            uptime_s=round(time.monotonic() - self._began_s, 3),
            state=health["status"],
            ready=health["ready"],
            cause=health["cause"],
            last_failure=lifecycle.last_failure,
            model=model.name if model else None,
            path=str(model.path) if model else None,
            http=self.http,
            rss_bytes=_rss_bytes(),
            progress=self.progress() if lifecycle.progress or self._measured else None,
            limits=model.limits if model else None,
            engine=engine if engine is None or with_requests else replace(engine, requests=()),
            memory=tuple(
                p.MemoryRow(use.name, use.planned_bytes, use.used_bytes)
                for use in (model.memory.uses() if model else ())
            ),
            api_key_file=str(self.api_key_file.resolve()) if self.api_key_file else None,
        )

    def _health(self) -> p.HealthResult:
        health = self._lifecycle.health()
        return p.HealthResult(health["status"], health["ready"], health["cause"])

    def _requests(self) -> p.RequestsResult:
        model = self._lifecycle.model
        if model is None:
            return p.RequestsResult(None, ())
        return p.RequestsResult(model.name, model.engine.status().requests)

    def _experts(self) -> p.ExpertsResult:
        model = self._lifecycle.model or self._lifecycle.current()
        status = model.engine.status()
        if not status.slots_total:
            raise NotReady(
                f"{model.name} is served without expert slots: every expert is computed in place",
                hint="ftd --expert-slots N or --vram turns them on",
            )
        return p.ExpertsResult(
            slots_total=status.slots_total,
            slots_used=status.slots_used,
            hits=status.expert_hits,
            misses=status.expert_misses,
            fetched=status.expert_fetched,
            evicted=status.expert_evicted,
        )

    async def _anchors(self, drop: bool, session: str | None) -> p.AnchorsResult:
        def look(core: Any) -> p.AnchorsResult:
            freed = core.drop_anchors(session) if drop else 0
            return p.AnchorsResult(name, core.anchor_infos(session), freed)

        model = self._lifecycle.model or self._lifecycle.current()
        name = model.name
        result: p.AnchorsResult = await model.engine.at_safe_point(look)
        return result

    async def _verify(self, tolerance: float, sessions: str | None) -> p.VerifyResult:
        model = self._lifecycle.current()
        path = Path(sessions) if sessions else SESSIONS
        recorded = await asyncio.to_thread(read_sessions, path)
        done: list[Verified] = []
        try:
            self._replaying = 1
            async for session in verify(model.engine, model.text, recorded, tolerance=tolerance):
                done.append(session)
                self._replaying += 1
        finally:
            self._replaying = 0
        facts = [f.name for f in fields(p.VerifiedSession)]
        shown = (p.VerifiedSession(**{name: getattr(d, name) for name in facts}) for d in done)
        return p.VerifyResult(model.name, tuple(shown), not any(d.unequal for d in done))

    def _cancel(self, request_id: str) -> p.CancelResult:
        model = self._lifecycle.model
        if model is None or not model.engine.cancel(request_id, "by an operator"):
            raise RequestInvalid(
                f"no request {request_id!r:.100} is running or waiting",
                param="request_id",
                hint="ftctl requests lists them",
            )
        return p.CancelResult(request_id)

    async def _check(self, model: str | None) -> p.CheckResult:
        name, preflight, report = await self._lifecycle.check(model)
        return p.CheckResult(
            model=name,
            report=report,
            need_bytes=preflight.need_bytes,
            available_bytes=preflight.available_bytes,
            beside=preflight.beside,
        )

    async def _reload(self, model: str | None, how: How, timeout_s: float | None) -> p.ReloadResult:
        done = await self._lifecycle.reload(model, how, self._timeout_s(timeout_s))
        return p.ReloadResult(**asdict(done))

    async def _budget(self, asked: p.Budget) -> p.BudgetResult:
        change = read_change(asked)
        served = self._lifecycle.model
        auto_was = served is not None and served.memory.auto
        context_was = served.engine.limits.context_tokens if served else 0
        done = None if change == Change() else await self._lifecycle.budget(change)
        model = self._lifecycle.current()
        now = model.engine.status()
        if done is None:
            kv_tokens, slots = now.pages_total * now.page_tokens, now.slots_total
            done = BudgetDone(kv_tokens, kv_tokens, slots, slots, 0, 0, 0, 0, paused_s=0.0)
        facts = asdict(done)
        paused_ms = round(1000 * facts.pop("paused_s"), 3)
        return p.BudgetResult(
            changed=change != Change(),
            auto=model.memory.auto,
            auto_was=auto_was,
            kv_tokens_most=model.engine.limits.pool_tokens,
            context_tokens=model.engine.limits.context_tokens,
            context_tokens_were=context_was,
            **facts,
            paused_ms=paused_ms,
            plan=tuple(model.memory.table().split("\n")),
        )

    async def _drain(self, timeout_s: float | None) -> p.DrainResult:
        began_s = time.monotonic()
        await self._lifecycle.drain(self._timeout_s(timeout_s))
        model, waited_s = self._lifecycle.model, round(time.monotonic() - began_s, 3)
        if self._lifecycle.state is State.UNLOADED:
            return p.DrainResult(self._lifecycle.listed().name, waited_s, unloaded=True)
        return p.DrainResult(model.name if model else "", waited_s)

    async def _trace(self, tokens: int, timeout_s: float) -> p.TraceResult:
        def progress(done_bytes: int, total_bytes: int) -> None:
            self._recorded = done_bytes, total_bytes

        # loads torch, for which the start does not wait
        from ftd.lifecycle.routing import record_routing

        model = self._lifecycle.current()
        try:
            kept = await record_routing(model.engine, tokens, timeout_s, progress)
        finally:
            self._recorded = None
        num_tokens, layers, each = kept.shape
        packed = base64.b64encode(kept.tobytes()).decode()
        return p.TraceResult(model.name, num_tokens, layers, each, str(kept.dtype), packed)

    async def _profile(self) -> p.ProfileResult:
        from ftd.lifecycle.profiling import profile_machine  # loads torch, as above

        def progress(done: Any) -> None:
            status = model.engine.status()
            self._measured = p.Progress(
                "measuring the machine",
                running=status.running,
                waiting=status.waiting,
                fraction=done.done / done.of,
            )

        model = self._lifecycle.current()
        try:
            done = await profile_machine(model.engine, progress)
        finally:
            self._measured = None
        return profile_result(
            model.name, done.measured, done.path, done.took_s, done.longest_pause_s
        )

    def _timeout_s(self, given_s: float | None) -> float:
        if given_s is None:
            return self._lifecycle.config.drain_timeout
        return self._bounded_s(given_s)

    def _bounded_s(self, given_s: float) -> float:
        if not 0 <= given_s <= 86400:
            raise RequestInvalid(
                f"timeout_s is {given_s:g}, 0 to 86400 s are possible", param="timeout_s"
            )
        return given_s


def profile_result(
    model: str, measured: Any, path: Path, took_s: float, longest_pause_s: float
) -> p.ProfileResult:
    """Of a ``ftd.engine.measuring.Measured``."""
    profile, key = measured.profile, measured.profile.key
    size, rows = profile.expert_bytes, []
    for of in profile.figures:
        table = profile.fetch_of(of.batch, measured.experts_per_token, measured.parts) or ()
        rows.append(
            p.ProfileRow(
                batch=of.batch,
                link_bytes_per_s=of.link.experts_per_s * size,
                link_fixed_s=of.link.fixed_s,
                cpu_bytes_per_s=of.cpu.experts_per_s * size,
                cpu_fixed_s=of.cpu.fixed_s,
                link_beside_cpu=of.link_beside_cpu,
                cpu_beside_link=of.cpu_beside_link,
                slots_bytes_per_s=of.hits.experts_per_s * size,
                layer_fixed_s=of.fixed_s,
                fetch_of=table[: measured.experts_per_token + 1],
            )
        )
    return p.ProfileResult(
        model=model,
        gpu=key.gpu,
        gpu_name=profile.gpu_name,
        cpu=key.cpu,
        threads=key.threads,
        experts=key.experts,
        expert_bytes=size,
        rows=tuple(rows),
        read_bytes_per_s=profile.read_bytes_per_s,
        handshake_s=profile.handshake_s,
        path=str(path),
        took_s=round(took_s, 3),
        longest_pause_s=longest_pause_s,
    )


def read_change(asked: p.Budget) -> Change:
    """Raises ConfigError: a value that no such flag takes."""
    kinds = {f.name: f.metadata["kind"] for f in settings()}

    def read(name: str) -> Any:
        text = getattr(asked, name)
        try:
            return None if text is None else kinds[name].read(text, typed=False)
        except ValueError as error:
            raise ConfigError(f"{flag(name)} {text}: {error}") from None

    vram: Any = "auto" if asked.vram == "auto" else read("vram")
    return Change(vram, read("kv_tokens"), read("expert_slots"), asked.auto)


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
