"""Which model is served: load, reload, drain, fail, recover, stop.

    loading ──► ready ◄──► reloading          A reload that is refused changes nothing.
       │         │ ▲           │
       ▼         ▼ │           ▼
     failed   draining      failed ──► loaded again, or the process ends ──► stopped

    ready ──► unloaded ──► loading: after --idle-unload without a request, until the next one

Lives on the event loop; whatever takes long runs on a thread beside it. One operation at a time:
a second reload is refused. An operation runs to its end even if whoever asked for it leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, NoReturn

import structlog

from ftd.cuda import early
from ftd.errors import FtdError, GpuLost, NotReady, TimedOut
from ftd.lifecycle.beside import on_thread
from ftd.lifecycle.leaving import close
from ftd.lifecycle.operations import Operations
from ftd.lifecycle.recovering import engine_failure, recover
from ftd.lifecycle.reloading import reload
from ftd.lifecycle.seat import Seat
from ftd.lifecycle.served import (
    BudgetDone,
    Candidate,
    How,
    Models,
    Phase,
    Preflight,
    Reloaded,
    ServedModel,
    State,
)
from ftd.memory.change import Change

if TYPE_CHECKING:
    from ftd.config import Config

log = structlog.get_logger(__name__)

DRAIN_TIMEOUT_S = 60.0  # how long running requests may take to finish, unless told otherwise
BALANCE_S = 1.0  # between two looks at what memory is worth where


class Lifecycle(Seat):
    """Owns the served model, and what is done with it.

    Args:
        config: ``config.model`` is loaded first; the other settings hold for every model.
        models: does the blocking work.
        clock: monotonic seconds.
    """

    def __init__(
        self, config: Config, models: Models, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(config, models, clock)
        self._operations = Operations(
            stopping=self.stopping.is_set,
            doing=lambda: str(self.progress or self.state),
            over=self._operation_over,
        )
        self._failures_s: list[float] = []  # of engines
        self._wakes_failed = 0
        self._fatal = ""  # why the process ends, if a failure ends it

    async def wait_ready(self, timeout_s: float | None) -> ServedModel:
        """The model that takes requests, waiting while a load, reload or recovery may bring one.

        Begins to load a model that was unloaded for being idle.

        Raises:
            NotReady: none is under way, or it took longer than ``timeout_s``.
        """
        failures = self._wakes_failed
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ready and (self._wake(failures) or self._may_become_ready()):
                    await self.wait_changed()
        except TimeoutError:
            pass
        return self.current()

    def _wake(self, failures: int) -> bool:
        """Load an unloaded model, unless that has failed since whoever asks began to wait."""
        if self.state is not State.UNLOADED or self._operations.under_way:
            return False
        if failures != self._wakes_failed or self.stopping.is_set():
            return False
        self._operations.begin("load", self._load_again())
        return True

    def _may_become_ready(self) -> bool:
        return self._operations.is_one_of(("load", "reload", "recovery", "unload"))

    def _operation_over(self) -> None:
        self.opening.progress = None
        self.notify()

    # ---- operations

    async def load(self) -> None:
        """Load the model that the configuration names. Raises what was wrong with it."""
        early.begin(self.config.device)
        loading = self._operations.begin("load", self._load_first(), tells=False)  # the start fails
        await asyncio.shield(loading)

    async def check(self, model: str | None = None) -> tuple[str, Preflight, tuple[str, ...]]:
        """Check a model's headers, config, plan, tokenizer and template; changes nothing.

        Returns:
            Its name, what was found, and the report that people read.
        """
        candidate: Candidate = await self._operations.run("check", self.look_at(model))
        report = await on_thread(candidate.preflight.report)
        return candidate.source.name, candidate.preflight, report

    async def reload(
        self, model: str | None = None, how: How = How.DRAIN, timeout_s: float = DRAIN_TIMEOUT_S
    ) -> Reloaded:
        """Serve another model, or the same one read anew.

        The next model is checked before the old one is touched. If both fit, and the next gets all
        that it would get alone, it is loaded beside;
        otherwise the old one's requests finish (for at most ``timeout_s``) or are cut, it is freed,
        and the next is loaded; should that fail, the old one is loaded again.

        Args:
            how: CUT ends requests at once with NotReady and a Retry-After.
        Raises:
            CheckpointError, BudgetExceeded, ConfigError, Busy: refused; the old model serves on.
            LoadFailed: the old model serves (again), unless the message says that it could not.
        """
        return await self._operations.run("reload", reload(self, model, how, timeout_s))

    async def budget(self, change: Change) -> BudgetDone:
        """Change how much memory the served model has, while its requests run.

        Raises:
            BudgetExceeded, ConfigError, Busy, NotReady: refused; nothing has changed.
        """
        return await self._operations.run("budget", self._budget(change))

    async def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Take no new requests and wait for those there are; an unloaded model has none.

        Raises TimedOut, NotReady.
        """
        await self._operations.run("drain", self._drain(timeout_s))

    async def unload(self) -> None:
        """Free the model until the next request. Raises NotReady, Busy."""
        await self._operations.run("unload", self._unload())

    def cut(self) -> None:
        """Let nothing wait for running requests any longer."""
        self.cutting.set()

    async def stop(self, timeout_s: float) -> None:
        """End for good: give up loading, let requests finish for ``timeout_s``, cut the rest."""
        give_up_s = self.clock() + timeout_s
        cause = f": {self._fatal}" if self._fatal else ""
        why = f"ftd is stopping{cause}"
        self.stopping.set()
        self.stand(State.DRAINING, why, ready=False)
        await self._operations.abandon()
        if self.model:
            if not self._fatal:  # else its requests have ended
                await self.empty(self.model.engine, How.DRAIN, give_up_s - self.clock())
            await close(self.model.engine, NotReady(why, retry_after_s=5))
            self.model = None
        self.stand(State.STOPPED, f"ftd has stopped{cause}", ready=False)

    # ---- what goes on all the time

    async def balance(self) -> NoReturn:
        """Let memory follow need, where a budget said so."""
        while True:
            await asyncio.sleep(BALANCE_S)
            if self.model is None or not self.ready or not self.model.memory.moves:
                continue
            with contextlib.suppress(FtdError):  # the engine goes, or a request has just come
                if done := await self.model.memory.rebalance():
                    log.info("budget.balanced", **asdict(done))

    async def supervise(self) -> NoReturn:
        """Load the model again when its engine fails.

        Raises:
            EngineFailed: it fails too often.
            GpuLost: nothing that this process loads would work.
        """
        try:
            await self._replace_failed()
        except FtdError as failure:
            self._fatal = failure.message
            raise

    async def _replace_failed(self) -> NoReturn:
        while True:
            failure = await engine_failure(self)
            cause = self.last_failure = str(failure)
            failed = self.model
            log.error("model.failed", model=failed and failed.name, cause=cause)
            self.stand(State.FAILED, cause, ready=False)
            await self._operations.wait_ended()  # it may be replacing the failed model anyway
            replaced = failed is not self.model
            del failed  # or it would live as long as its successor
            if isinstance(failure, GpuLost):
                raise failure
            if not replaced and not self.stopping.is_set():
                await self._operations.run("recovery", recover(self, self._failures_s, cause))

    # ---- the short operations

    async def _load_first(self) -> None:
        try:
            self.serve(await self.open(await self.look_at()))
        except BaseException as error:
            self.stand(State.FAILED, str(error) or "loading was given up", ready=False)
            raise

    async def _unload(self) -> None:
        model = self.current()
        listed = model.listed
        del model
        why = "the model is being unloaded"
        await self.make_room(How.DRAIN, self.config.drain_timeout, why)
        self.unloaded = listed
        self.stand(State.UNLOADED, "the model is unloaded until a request comes", ready=False)
        log.info("model.unloaded", model=listed.name)

    async def _load_again(self) -> None:
        began_s = self.clock()
        self.stand(State.LOADING, "the model is being loaded again", ready=False)
        try:
            self.serve(await self.open(await self.look_at()))
        except BaseException as error:
            self._wakes_failed += 1
            self.last_failure = str(error) or "loading was given up"
            self.stand(State.UNLOADED, self.last_failure, ready=False)
            raise
        log.info("model.loaded", model=self.config.model, load_s=self.since(began_s))

    async def _budget(self, change: Change) -> BudgetDone:
        model = self.current()
        self.opening.phase(Phase.RESIZING)
        done = await model.memory.apply(change)
        self.by_need = model.memory.auto
        self.config = model.memory.config
        log.info("budget.changed", **asdict(done))
        return done

    async def _drain(self, timeout_s: float) -> None:
        if self.state is State.UNLOADED:
            return
        model = self.model if self.state is State.DRAINING else self.current()
        assert model is not None
        self.stand(State.DRAINING, "the model is being drained", ready=False)
        if not await self.empty(model.engine, How.DRAIN, timeout_s):
            left = model.engine.status()
            raise TimedOut(
                f"{left.running} running and {left.waiting} waiting requests are left after "
                f"{timeout_s:g} s; new ones are still refused",
                hint="drain again, cancel them, or ftctl reload to serve again",
            )
        log.info("model.drained", model=model.name)
