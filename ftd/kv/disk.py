"""Keeps KV on disk: written behind the engine's back, and read before a request is admitted.

One worker thread does all reading and writing. To write, it copies pages straight from the memory
that steps use, a GPU's too, and stops no step: a whole page of the prefix tree does not change
while the tree keeps it, and ``PagePool.lives`` tells afterwards whether it did. What is read is
handed over when it has been checked; the engine copies it into pages of its own between two steps.

Nothing on disk is needed: what is damaged, foreign or gone is left out, with a line in the log.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import structlog
import torch

from ftd.errors import ConfigError
from ftd.kv.anchors import AnchorKind
from ftd.kv.block_file import SUFFIX, BlockUnusable, Head, read_block, read_head, write_block
from ftd.kv.block_index import BlockIndex, Entry
from ftd.kv.cache import KvCache
from ftd.kv.disk_jobs import Block, Offer, Reading, StateAt, up_to_a_state
from ftd.kv.pages import PagePool
from ftd.kv.states import KeptState, StatePool
from ftd.kv.value import chance

log = structlog.get_logger(__name__)

BLOCK_PAGES = 16
MOST_JOBS = 64  # of writing; beyond these the oldest is left out
REST_S = 60.0  # after a disk that refused to be written
CLOSE_S = 10.0
LOOK_S = 0.005
# Of a recurrent state to be resumed from, below which its many bytes are not worth a place on disk.
LEAST_CHANCE = chance(AnchorKind.TURN)

Data = bytes | memoryview


def try_directory(directory: Path) -> None:
    """Raise ConfigError where no store could be: found by making a folder, removed at once."""
    try:
        place = next(p for p in (directory, *directory.absolute().parents) if p.exists())
        probe = place / f".ftd-probe-{os.getpid()}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise _unusable(directory, error) from error


def _unusable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{directory} cannot hold anchors: {error.strerror or error}",
        hint="name a directory that can be written with --anchor-dir",
    )


class DiskStore:
    """
    Args:
        directory: made if it is missing; other models' blocks may be in it.
        model: digest of weights, type and layout.
        limit_bytes: of this model's files.
        wake: called from the worker when something has been read.
        states: accounts of ``kv.states``, of a model that has them.
    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        model: str,
        limit_bytes: int,
        kv: KvCache,
        pool: PagePool,
        wake: Callable[[], None] = lambda: None,
        states: StatePool | None = None,
    ) -> None:
        self.wake = wake
        self._directory = directory / model[:16]
        self._limit_bytes = limit_bytes
        self._kv, self._pool, self._states = kv, pool, states
        self._index = BlockIndex(model, BLOCK_PAGES * pool.page_tokens)
        self._lock = threading.Lock()  # of the index
        self._jobs: deque[Offer] = deque()
        self._readings: deque[Reading] = deque()
        self._work = threading.Semaphore(0)
        self._busy = False
        self._closed = False
        self._rests_until_s = 0.0
        self._reading: Reading | None = None  # under way
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._scan()
        except OSError as error:
            raise _unusable(directory, error) from error
        self._thread = threading.Thread(target=self._run, name="ftd-anchors", daemon=True)
        self._thread.start()

    # ---- on the engine thread

    @property
    def bytes(self) -> int:
        return self._index.bytes

    def offer(
        self,
        ids: array[int],
        pages: Sequence[int],
        chance: float,
        anchors: tuple[tuple[int, str, str], ...],
        states: Sequence[KeptState] = (),
    ) -> None:
        """Have what is computed of a sequence written; its pages are in the prefix tree.

        Args:
            states: kept ones that its tokens come by.
        """
        lives = tuple(self._pool.lives[page] for page in pages)
        at = tuple(
            StateAt(s.position, s.chance, s.slot, self._states.lives[s.slot])
            for s in states
            if self._states and s.chance >= LEAST_CHANCE
        )
        if len(self._jobs) >= MOST_JOBS:
            self._jobs.popleft()
        kept = array("i", pages)
        self._jobs.append(Offer(ids, kept, lives, chance, anchors, at, self._kv.mark()))
        self._work.release()

    def read(self, ids: array[int], known_tokens: int) -> Reading | None:
        """Begin to read what the disk has of ``ids`` beyond ``known_tokens``; None: nothing."""
        with self._lock:
            entries = self._index.known(ids)
        if self._states and self._states.num_slots:
            entries = up_to_a_state(entries, known_tokens, len(ids))
        wanted = [(e, n) for e, n in entries if e.head.begin + n > known_tokens]
        if not wanted:
            return None
        reading = Reading(ids, wanted)
        self._readings.append(reading)
        self._work.release()
        return reading

    def entries(self) -> list[Entry]:
        """All blocks, each behind the one it continues."""
        with self._lock:
            return sorted(self._index, key=lambda entry: entry.head.begin)

    def clear(self) -> None:
        """Remove all files."""
        with self._lock:
            entries = list(self._index)
            for entry in entries:
                self._remove(entry)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until all that was offered has been written or left out."""
        until_s = time.monotonic() + timeout_s
        while self._jobs or self._readings or self._busy:
            if time.monotonic() > until_s:
                return False
            time.sleep(LOOK_S)
        return True

    def close(self) -> None:
        """Write what is left, for a few seconds at most, and stop."""
        self.wait_idle(CLOSE_S)
        self._closed = True
        if reading := self._reading:
            reading.room.release()
        self._work.release()
        self._thread.join()

    # ---- on the worker thread

    def _run(self) -> None:
        while not self._closed:
            self._work.acquire()
            self._busy = True
            if self._readings and not self._closed:  # somebody waits for these
                self._read(self._readings.popleft())
            elif self._jobs and not self._closed:
                self._write(self._jobs.popleft())
            self._busy = False

    def _write(self, offer: Offer) -> None:
        if time.monotonic() < self._rests_until_s:
            return
        begin = 0
        offer.ready.wait()
        for key, parent, ids in list(self._index.blocks(offer.ids)):
            with self._lock:
                known = self._index.get(key)
            stored = {position for position, _ in known.head.states} if known else set()
            end = begin + len(ids)
            lacking = any(begin < s.position <= end and s.position not in stored
                          for s in offer.states)  # fmt: skip
            if (known is None or lacking) and not self._write_block(offer, key, parent, begin, ids):
                return
            begin = end

    def _write_block(
        self, offer: Offer, key: str, parent: str, begin: int, ids: array[int]
    ) -> bool:
        """False: the rest of the sequence cannot be written either."""
        first = begin // self._pool.page_tokens
        last = first + -(-len(ids) // self._pool.page_tokens)
        pages = list(offer.pages[first:last])
        data = self._kv.gather(pages)
        if data is None or any(
            self._pool.lives[page] != life
            for page, life in zip(pages, offer.lives[first:last], strict=True)
        ):
            return False  # evicted in the meantime
        end = begin + len(ids)
        anchors = tuple(a for a in offer.anchors if begin < a[0] <= end)
        kv = data.numpy().data.cast("B")
        path = self._directory / f"{key}{SUFFIX}"
        states = self._stored_states(key, path) | self._states_within(offer, begin, end)
        head = Head(
            self._index.model,
            parent,
            begin,
            len(ids),
            len(kv),
            offer.chance,
            anchors,
            tuple((position, states[position][0]) for position in sorted(states)),
            self._state_bytes,
        )
        try:
            size = write_block(path, head, ids, kv, *(states[p][1] for p in sorted(states)))
        except OSError as error:
            self._rests_until_s = time.monotonic() + REST_S
            log.warning("anchors.not_written", cause=str(error), rest_s=REST_S)
            return False
        with self._lock:
            for entry in self._index.covered(parent, ids):
                self._remove(entry)
            self._index.remove(key)
            self._index.add(Entry(key, head, ids, size, time.time()))
            for entry in self._index.first_out(self._limit_bytes):
                self._remove(entry)
        return True

    @property
    def _state_bytes(self) -> int:
        return self._kv.states.slot_bytes if self._kv.states else 0

    def _states_within(self, offer: Offer, begin: int, end: int) -> dict[int, tuple[float, Data]]:
        """By position, with the chance of a match, those that are kept still."""
        found: dict[int, tuple[float, Data]] = {}
        for state in offer.states:
            if self._kv.states and self._states and begin < state.position <= end:
                data = self._kv.states.slot(state.slot).cpu().numpy().tobytes()
                if self._states.lives[state.slot] == state.life:
                    found[state.position] = (state.chance, data)
        return found

    def _stored_states(self, key: str, path: Path) -> dict[int, tuple[float, Data]]:
        """Those of a file that is about to be written anew."""
        with self._lock:
            if key not in self._index:
                return {}
        try:
            head, _, data = read_block(path, self._index.model)
        except (BlockUnusable, OSError) as error:
            self._ignore(path, error)
            return {}
        size, first = head.state_bytes, head.kv_bytes
        return {
            position: (chance, data[first + i * size :][:size])
            for i, (position, chance) in enumerate(head.states)
        }

    def _read(self, reading: Reading) -> None:
        self._reading = reading
        for entry, tokens in reading.entries:
            reading.room.acquire()
            if reading.unwanted or self._closed:
                break
            path = self._directory / f"{entry.key}{SUFFIX}"
            try:
                head, ids, data = read_block(path, self._index.model)
                block = self._block(head, tokens, data)
            except (BlockUnusable, OSError) as error:
                self._ignore(path, error)
                with self._lock:
                    self._index.remove(entry.key)
                break
            assert reading.ids[head.begin : head.begin + tokens] == ids[:tokens], head.begin
            entry.used_s = time.time()
            os.utime(path)
            reading.blocks.append(block)
            self.wake()
        reading.over = True
        self.wake()

    def _block(self, head: Head, tokens: int, rest: memoryview) -> Block:
        kv, states = rest[: head.kv_bytes], rest[head.kv_bytes :]
        pages = -(-head.tokens // self._pool.page_tokens)
        if len(kv) != pages * self._kv.page_bytes:
            raise BlockUnusable(
                f"it holds {len(kv):,} bytes of KV, {pages * self._kv.page_bytes:,} are right"
            )
        size = self._state_bytes
        if head.states and head.state_bytes != size:
            raise BlockUnusable(f"it holds states of {head.state_bytes:,} bytes, not {size:,}")
        data = self._kv.staging(pages)
        data.numpy().reshape(-1)[:] = np.frombuffer(kv, np.uint8)
        found = {
            position: torch.frombuffer(bytearray(states[i * size :][:size]), dtype=torch.uint8)
            for i, (position, _) in enumerate(head.states)
        }
        return Block(head, tokens, data, found)

    def _scan(self) -> None:
        """Find the blocks of earlier runs."""
        for path in sorted(self._directory.iterdir()):
            if path.suffix == ".part":
                self._remove_if_cut(path)
                continue
            try:
                if path.suffix != SUFFIX:
                    raise BlockUnusable("it is no file of ours")
                head, ids, size = read_head(path, self._index.model)
                used_s = path.stat().st_mtime
            except (BlockUnusable, OSError) as error:
                self._ignore(path, error)
                continue
            self._index.add(Entry(path.stem, head, ids, size, used_s))
        for entry in self._index.first_out(self._limit_bytes):
            self._remove(entry)
        log.info("anchors.found", blocks=len(self._index), bytes=self._index.bytes)

    def _remove_if_cut(self, path: Path) -> None:
        """A file that nobody has gone on writing for long; another daemon may be at a newer one."""
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > REST_S:
                path.unlink()

    def _remove(self, entry: Entry) -> None:
        self._index.remove(entry.key)
        (self._directory / f"{entry.key}{SUFFIX}").unlink(missing_ok=True)

    def _ignore(self, path: Path, error: Exception) -> None:
        log.warning("anchors.file_ignored", file=str(path), cause=str(error))
