"""Which model is served: load, reload, drain, fail, recover, stop.

    loading ──► ready ◄──► reloading          A reload that is refused changes nothing.
       │         │ ▲           │
       ▼         ▼ │           ▼
     failed   draining      failed ──► loaded again, or the process ends ──► stopped

    ready ──► unloaded ──► loading: after --idle-unload without a request, until the next one

Lives on the event loop; whatever takes long runs on a thread beside it. One operation at a time:
a second reload is refused. An operation runs to its end even if whoever asked for it leaves.
Nothing here may keep an engine alive once it is closed: memory is what this is about.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import structlog

from ftd.cuda import early
from ftd.engine.api import EngineHandle
from ftd.errors import (
    Busy,
    EngineFailed,
    FtdError,
    GpuLost,
    LoadFailed,
    NotReady,
    TimedOut,
)
from ftd.lifecycle.beside import cancel_all, on_thread, trim_memory
from ftd.lifecycle.leaving import close, empty
from ftd.lifecycle.opening import Opening
from ftd.lifecycle.served import (
    BudgetDone,
    Candidate,
    How,
    Listed,
    Models,
    Phase,
    Preflight,
    Progress,
    Reloaded,
    ServedModel,
    State,
)
from ftd.lifecycle.succession import recovery_delay_s, retry_after_s
from ftd.memory.change import Change

if TYPE_CHECKING:
    from ftd.config import Config

log = structlog.get_logger(__name__)

DRAIN_TIMEOUT_S = 60.0  # how long running requests may take to finish, unless told otherwise
BALANCE_S = 1.0  # between two looks at what memory is worth where
CANCEL_TIMEOUT_S = 1.0  # a loader notices within one piece of reading; a stuck one is left behind
_NO_MODEL = "no model is loaded; try ftctl reload MODEL"

T = TypeVar("T")


class Lifecycle:
    """Owns the served model.

    Args:
        config: ``config.model`` is loaded first; the other settings hold for every model.
        models: does the blocking work.
        clock: monotonic seconds.
    """

    def __init__(
        self, config: Config, models: Models, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = State.LOADING
        self.model: ServedModel | None = None  # the loaded one, whether or not it takes requests
        self.config = config  # of that model, or the last one
        self.last_failure: str | None = None  # of an engine or a reload; a good reload clears it
        self._clock = clock
        self._cause = "the model is loading"
        self._accepting = False
        self._operation: asyncio.Task[Any] | None = None
        self._changed = asyncio.Event()  # replaced at each change
        self._stopping = threading.Event()  # read by loader threads
        self._cutting = asyncio.Event()  # nobody waits for requests to finish any longer
        self._opening = Opening(
            models,
            old=lambda: self.model.memory.footprint if self.model else None,
            given_up=self._stopping.is_set,
            clock=clock,
        )
        self._failures_s: list[float] = []
        self._unloaded: Listed | None = None  # the model that the next request loads
        self._wakes_failed = 0
        self._fatal = ""  # why the process ends, if a failure ends it
        self._by_need = False  # budgets of models to come, too, are divided by need

    # ---- what anybody may ask at any time

    @property
    def progress(self) -> Progress | None:
        """Of the operation under way."""
        return self._opening.progress

    @property
    def ready(self) -> bool:
        """Whether a model takes requests: after its first real step, until it fails or goes."""
        return self._accepting

    @property
    def heartbeat(self) -> int:
        """Differs from its last value if whoever works now has moved on."""
        if self.model and self.state is not State.FAILED:
            return self.model.engine.heartbeat
        if self.progress and self.progress.phase is Phase.READING:
            return self._opening.pieces
        return time.monotonic_ns()  # only the loop itself is at work

    def current(self) -> ServedModel:
        """The model that takes requests now. Raises NotReady with cause and Retry-After."""
        if self.model is None or not self._accepting:
            raise self._not_ready()
        return self.model

    async def wait_ready(self, timeout_s: float | None) -> ServedModel:
        """The model that takes requests, waiting while a load, reload or recovery may bring one.

        Begins to load a model that was unloaded for being idle.

        Raises:
            NotReady: none is under way, or it took longer than ``timeout_s``.
        """
        failures = self._wakes_failed
        try:
            async with asyncio.timeout(timeout_s):
                while not self._accepting and (self._wake(failures) or self._may_become_ready()):
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.current()

    async def wait_changed(self) -> None:
        """Wait until state, model or operation differ."""
        await self._changed.wait()

    def listed(self) -> Listed:
        """Of the model that takes requests, or will once one comes. Raises NotReady."""
        if self._unloaded is not None and self.model is None:
            return self._unloaded
        return self.current().listed

    def health(self) -> dict[str, Any]:
        refusal = None if self._accepting else self._not_ready()
        known = self.model or self._unloaded
        return {
            "status": str(self.state),
            "ready": self._accepting or self.state is State.UNLOADED,
            "model": known.name if known else None,
            "cause": refusal.message if refusal else None,
            "retry_after_s": refusal.retry_after_s if refusal else None,
            "last_failure": self.last_failure,
            "progress": self.progress.facts() if self.progress else None,
        }

    # ---- operations

    async def load(self) -> None:
        """Load the model that the configuration names. Raises what was wrong with it."""
        early.begin(self.config.device)
        await self._run("load", self._load_first())

    async def check(self, model: str | None = None) -> tuple[str, Preflight, tuple[str, ...]]:
        """Check a model's headers, config, plan, tokenizer and template; changes nothing.

        Returns:
            Its name, what was found, and the report that people read.
        """
        candidate = await self._run("check", self._look_at(model))
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
        return await self._run("reload", self._reload(model, how, timeout_s))

    async def budget(self, change: Change) -> BudgetDone:
        """Change how much memory the served model has, while its requests run.

        Raises:
            BudgetExceeded, ConfigError, Busy, NotReady: refused; nothing has changed.
        """
        return await self._run("budget", self._budget(change))

    async def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Take no new requests and wait for those there are; an unloaded model has none.

        Raises TimedOut, NotReady.
        """
        await self._run("drain", self._drain(timeout_s))

    async def unload(self) -> None:
        """Free the model until the next request. Raises NotReady, Busy."""
        await self._run("unload", self._unload())

    def cut(self) -> None:
        """Let nothing wait for running requests any longer."""
        self._cutting.set()

    async def stop(self, timeout_s: float) -> None:
        """End for good: give up loading, let requests finish for ``timeout_s``, cut the rest."""
        give_up_s = self._clock() + timeout_s
        cause = f": {self._fatal}" if self._fatal else ""
        why = f"ftd is stopping{cause}"
        self._stopping.set()
        self._stand(State.DRAINING, why, accepting=False)
        await self._abandon_operation()
        if self.model:
            if not self._fatal:  # else its requests have ended
                await self._empty(self.model.engine, How.DRAIN, give_up_s - self._clock())
            await close(self.model.engine, NotReady(why, retry_after_s=5))
            self.model = None
        self._stand(State.STOPPED, f"ftd has stopped{cause}", accepting=False)

    async def balance(self) -> NoReturn:
        """Let memory follow need, where a budget said so."""
        while True:
            await asyncio.sleep(BALANCE_S)
            if self.model is None or not self._accepting or not self.model.memory.moves:
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
            failure = await self._engine_failure()
            cause = self.last_failure = str(failure)
            failed = self.model
            log.error("model.failed", model=failed and failed.name, cause=cause)
            self._stand(State.FAILED, cause, accepting=False)
            if self._operation:  # it may be replacing the failed model anyway
                await asyncio.wait({self._operation})
            replaced = failed is not self.model
            del failed  # or it would live as long as its successor
            if isinstance(failure, GpuLost):
                raise failure
            if not replaced and not self._stopping.is_set():
                await self._run("recovery", self._recover(cause))

    # ---- how operations are run

    async def _run(self, name: str, operation: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._begin(name, operation))

    def _begin(self, name: str, operation: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        if self._operation or self._stopping.is_set():
            operation.close()
            other = self._operation.get_name() if self._operation else "stop"
            raise Busy(
                f"no {name} now: a {other} is under way ({self.progress or self.state})",
                hint="ftctl watch shows when it is over",
            )
        task = asyncio.get_running_loop().create_task(operation, name=name)
        self._operation = task
        task.add_done_callback(self._operation_ended)
        return task

    def _operation_ended(self, task: asyncio.Task[Any]) -> None:
        self._operation = self._opening.progress = None
        self._notify()
        if not task.cancelled() and (error := task.exception()):
            surprise = None if isinstance(error, FtdError) else error
            if not surprise and task.get_name() == "load" and self.state is State.FAILED:
                return  # the start fails with it, and says so
            tell = log.error if surprise else log.warning
            tell("operation.failed", operation=task.get_name(), error=str(error), exc_info=surprise)

    async def _abandon_operation(self) -> None:
        """A load notices ``_stopping`` by itself; whatever waits longer is cancelled."""
        if task := self._operation:
            await asyncio.wait({task}, timeout=CANCEL_TIMEOUT_S)
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_TIMEOUT_S)

    def _wake(self, failures: int) -> bool:
        """Load an unloaded model, unless that has failed since whoever asks began to wait."""
        if self.state is not State.UNLOADED or self._operation or self._stopping.is_set():
            return False
        if failures == self._wakes_failed:
            self._begin("load", self._load_again())
        return self._operation is not None

    def _may_become_ready(self) -> bool:
        bring_one = ("load", "reload", "recovery", "unload")
        under_way = self._operation and self._operation.get_name() in bring_one
        return bool(under_way) and not self._stopping.is_set()

    # ---- the operations

    async def _load_first(self) -> None:
        try:
            self._serve(await self._open(await self._look_at(None)))
        except BaseException as error:
            self._stand(State.FAILED, str(error) or "loading was given up", accepting=False)
            raise

    async def _unload(self) -> None:
        model = self.current()
        listed = model.listed
        del model
        why = "the model is being unloaded"
        await self._make_room(How.DRAIN, self.config.drain_timeout, why)
        self._unloaded = listed
        self._stand(State.UNLOADED, "the model is unloaded until a request comes", accepting=False)
        log.info("model.unloaded", model=listed.name)

    async def _load_again(self) -> None:
        began_s = self._clock()
        self._stand(State.LOADING, "the model is being loaded again", accepting=False)
        try:
            self._serve(await self._open(await self._look_at(None)))
        except BaseException as error:
            self._wakes_failed += 1
            self.last_failure = str(error) or "loading was given up"
            self._stand(State.UNLOADED, self.last_failure, accepting=False)
            raise
        log.info("model.loaded", model=self.config.model, load_s=self._since(began_s))

    async def _reload(self, name: str | None, how: How, timeout_s: float) -> Reloaded:
        before = self.state, self._cause, self._accepting
        was = self.model.name if self.model else None
        began_s = self._clock()
        fresh = None
        self._stand(State.RELOADING, "the model is being replaced", accepting=self._accepting)
        try:
            candidate = await self._look_at(name)
            if self.model and candidate.preflight.beside:
                fresh = await self._open(candidate)
        except BaseException:
            if self.state is State.RELOADING:  # else the old engine has failed meanwhile
                self._stand(before[0], before[1], accepting=before[2])
            raise
        if fresh:
            load_s, unready_s = self._since(began_s), 0.0
            drained = await self._switch(fresh, candidate, how, timeout_s)
        else:
            left_s = self._clock()
            drained = await self._make_room(how, timeout_s)
            began_s = self._clock()
            await self._replace(candidate, was if before[0] is not State.FAILED else None)
            load_s, unready_s = self._since(began_s), self._since(left_s)
        self.last_failure = None
        done = Reloaded(candidate.source.name, was, fresh is not None, drained, load_s, unready_s)
        log.info("model.reloaded", model=done.model, was=was, load_s=load_s, unready_s=unready_s)
        return done

    async def _switch(
        self, fresh: ServedModel, candidate: Candidate, how: How, timeout_s: float
    ) -> bool:
        """Serve ``fresh`` at once; the old model's requests finish. False: some were cut."""
        assert self.model is not None
        engine, self.config = self.model.engine, candidate.config
        self._serve(fresh)
        try:
            return await self._empty(engine, how, timeout_s)
        finally:
            await close(engine, NotReady("the model was replaced", retry_after_s=1))
            del engine
            await on_thread(trim_memory)

    async def _make_room(
        self, how: How, timeout_s: float, why: str = "the model is being replaced"
    ) -> bool:
        """Free the old model. False: some of its requests were cut."""
        self._stand(self.state, why, accepting=False)
        if self.model is None:
            return True
        engine, self.model = self.model.engine, None
        try:
            return await self._empty(engine, how, timeout_s)
        finally:
            await close(engine, NotReady(why, retry_after_s=5))
            del engine
            await on_thread(trim_memory)

    async def _replace(self, candidate: Candidate, old_name: str | None) -> None:
        """Load into the room made; if that fails, load the old model (None: there was none)."""
        try:
            now_alone = await self._opening.preflight(candidate.config, candidate.source)
            self._serve(await self._open(replace(candidate, preflight=now_alone)))
        except Exception as error:
            failure = f"loading {candidate.source.name} failed: {error}"
        else:
            self.config = candidate.config
            return
        self.last_failure = failure
        if old_name is None or self._stopping.is_set():
            self._stand(State.FAILED, failure, accepting=False)
            raise LoadFailed(failure, hint=_NO_MODEL)
        log.error("model.load_failed", model=candidate.source.name, error=failure)
        try:
            self._serve(await self._open(await self._look_at(None)))
        except Exception as error:
            failure = f"{failure}; loading {old_name} again failed too: {error}"
            self._stand(State.FAILED, failure, accepting=False)
            raise LoadFailed(failure, hint=_NO_MODEL) from error
        raise LoadFailed(failure, hint=f"{old_name} was loaded again and serves")

    async def _budget(self, change: Change) -> BudgetDone:
        model = self.current()
        self._opening.phase(Phase.RESIZING)
        done = await model.memory.apply(change)
        self._by_need = model.memory.auto
        self.config = model.memory.config
        log.info("budget.changed", **asdict(done))
        return done

    async def _drain(self, timeout_s: float) -> None:
        if self.state is State.UNLOADED:
            return
        model = self.model if self.state is State.DRAINING else self.current()
        assert model is not None
        self._stand(State.DRAINING, "the model is being drained", accepting=False)
        if not await self._empty(model.engine, How.DRAIN, timeout_s):
            left = model.engine.status()
            raise TimedOut(
                f"{left.running} running and {left.waiting} waiting requests are left after "
                f"{timeout_s:g} s; new ones are still refused",
                hint="drain again, cancel them, or ftctl reload to serve again",
            )
        log.info("model.drained", model=model.name)

    async def _recover(self, cause: str) -> None:
        """Load the failed model again, waiting longer each time."""
        while True:
            self._failures_s.append(self._clock())
            delay_s = recovery_delay_s(self._failures_s, self._clock())
            if delay_s is None:
                raise EngineFailed(f"the engine failed too often, at last: {cause}")
            self._opening.phase(Phase.WAITING)
            if self.model:
                engine, self.model = self.model.engine, None
                await close(engine, NotReady(f"the engine failed: {cause}", retry_after_s=5))
                del engine
                await on_thread(trim_memory)
            await asyncio.sleep(delay_s)
            try:
                self._serve(await self._open(await self._look_at(None)))
            except Exception as error:
                if self._stopping.is_set():
                    raise
                cause = f"loading {self.config.model} again failed: {error}"
                log.error("model.not_recovered", failures=len(self._failures_s), cause=cause)
                self.last_failure = cause
                self._stand(State.FAILED, cause, accepting=False)
            else:
                log.warning("model.recovered", model=self.config.model, cause=cause)
                return

    # ---- steps of operations

    async def _look_at(self, model: str | None) -> Candidate:
        return await self._opening.look_at(
            replace(self.config, model=model) if model else self.config
        )

    async def _open(self, candidate: Candidate) -> ServedModel:
        return await self._opening.open(candidate, by_need=self._by_need)

    async def _empty(self, engine: EngineHandle, how: How, timeout_s: float) -> bool:
        self._opening.phase(Phase.DRAINING)
        return await empty(engine, how, timeout_s, self._cutting)

    async def _engine_failure(self) -> Exception:
        """Wait for the failure of whichever engine is loaded at that time."""
        while True:
            waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._changed.wait())]
            if self.model and self.state is not State.FAILED:
                waits.append(asyncio.ensure_future(self.model.engine.wait_failed()))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if waits[-1].done() and len(waits) > 1:
                    return waits[-1].result()
            finally:
                await cancel_all(*waits)

    # ---- facts

    def _serve(self, model: ServedModel) -> None:
        self.model, self._opening.progress, self._unloaded = model, None, None
        self._stand(State.READY, "", accepting=True)

    def _stand(self, state: State, cause: str, *, accepting: bool) -> None:
        self.state, self._cause, self._accepting = state, cause, accepting
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _since(self, began_s: float) -> float:
        return round(self._clock() - began_s, 3)

    def _not_ready(self) -> NotReady:
        progress = self.progress
        if progress is None:
            return NotReady(self._cause, hint="ftctl status says more", retry_after_s=5)
        elapsed_s = self._clock() - progress.began_s
        after_s = round(retry_after_s(elapsed_s, progress.done_bytes, progress.total_bytes))
        return NotReady(
            f"{self._cause}: {progress}", hint=f"retry in {after_s} s", retry_after_s=after_s
        )
