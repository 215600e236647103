"""From a name to a model that computes: first all that can be refused, then weights, then a step.

Blocking work runs on threads beside the event loop; ``progress`` says how far it has come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from ftd.errors import FtdError, LoadFailed, NotReady, first_line
from ftd.lifecycle.beside import cancel_all, on_thread
from ftd.lifecycle.served import Candidate, Models, Phase, Preflight, Progress, ServedModel
from ftd.lifecycle.succession import Footprint
from ftd.memory.change import Change

if TYPE_CHECKING:
    from ftd.checkpoint.source import ModelSource
    from ftd.config import Config

log = structlog.get_logger(__name__)


class Opening:
    """
    Args:
        old: what the model takes that is loaded now, if there is one.
        given_up: asked by loader threads.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        models: Models,
        *,
        old: Callable[[], Footprint | None],
        given_up: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self.progress: Progress | None = None  # of the operation under way, whatever it is
        self.pieces = 0  # of loading that have been done
        self._models, self._old = models, old
        self._given_up, self._clock = given_up, clock

    def phase(self, phase: Phase) -> None:
        self.progress = Progress(phase, self._clock())

    async def look_at(self, config: Config) -> Candidate:
        """Everything about a model that can be refused without reading its weights."""
        self.phase(Phase.FINDING)
        began_s = time.monotonic()
        source = await on_thread(lambda: self._models.resolve(config.model, self._on_piece))
        self.phase(Phase.CHECKING)
        found_s = time.monotonic()
        text = asyncio.ensure_future(on_thread(lambda: self._models.open_text(source)))
        try:  # a large vocabulary and a GPU's context take about as long
            preflight = await self.preflight(config, source)
            candidate = Candidate(config, source, await text, preflight)
        finally:
            await cancel_all(text)
        seconds = {"find_s": found_s - began_s, "check_s": time.monotonic() - found_s}
        log.info("model.checked", **{name: round(s, 2) for name, s in seconds.items()})
        return candidate

    async def preflight(self, config: Config, source: ModelSource) -> Preflight:
        old = self._old()
        return await on_thread(lambda: self._models.check(config, source, old))

    async def open(self, candidate: Candidate, *, by_need: bool) -> ServedModel:
        """Load, and run a first real step. Raises FtdError.

        Args:
            by_need: divide the budget between slots and KV by need.
        """
        self.phase(Phase.READING)
        config, source = candidate.config, candidate.source
        dialect = None if config.tool_dialect == "auto" else config.tool_dialect
        vocab = candidate.preflight.vocab
        constraints = asyncio.ensure_future(
            on_thread(lambda: candidate.text.prepare_constraints(vocab, dialect))
        )
        try:
            loaded = await on_thread(
                lambda: self._models.load(
                    config, candidate.preflight, self._on_piece, self._given_up
                )
            )
            await constraints
        except FtdError:
            raise
        except Exception as error:
            log.error("model.load_failed", model=source.name, exc_info=error)
            hint = "the log has the traceback"
            cause = f"{type(error).__name__}: {first_line(error)}"
            raise LoadFailed(f"{source.name}: {cause}", hint=hint) from None
        finally:
            await cancel_all(constraints)
        if by_need:
            await loaded.memory.apply(Change(auto=True))
        names = dict.fromkeys((*config.served_name, source.name, config.model, str(source.path)))
        name, *aliases = names
        return ServedModel(
            name=name,
            aliases=tuple(aliases),
            created=int(time.time()),
            path=source.path,
            text=candidate.text,
            engine=loaded.engine,
            memory=loaded.memory,
        )

    def _on_piece(self, done_bytes: int, total_bytes: int) -> None:
        """Called on the loader's thread; one assignment, so readers see one or the other."""
        if self._given_up():
            raise NotReady("loading was given up: ftd is stopping", retry_after_s=5)
        if progress := self.progress:
            if progress.phase is Phase.READING and 0 < total_bytes <= done_bytes:
                self.phase(Phase.WARMING_UP)  # all read: what is left is a first real step
            else:
                self.progress = replace(progress, done_bytes=done_bytes, total_bytes=total_bytes)
        self.pieces += 1
