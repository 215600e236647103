"""Read all weights, by several threads, straight to where they stay.

Expert matrices land in the records of the host pool, dense tensors in tensors of their own; nothing
is mapped and nothing held twice, and what has been read is dropped from the page cache. The plan
sorts all pieces by file and offset and joins neighbours into large reads: the three matrices of an
expert usually lie side by side, so one ``preadv`` fills a whole record.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ftd.checkpoint.collector import without_collector
from ftd.checkpoint.headers import Checkpoint, dense_matrices
from ftd.checkpoint.stored import Section, StoredMatrix, find_matrix, find_vector
from ftd.checkpoint.tensorfile import FileStamp, TensorInfo, open_regular
from ftd.errors import CheckpointError, NotReady
from ftd.experts.host_pool import HostPool
from ftd.kernels.cpu.topology import usable_cores
from ftd.kernels.formats import Matrix, MatrixLayout, PackedMatrix
from ftd.model.architecture import Architecture
from ftd.model.spec import ModelSpec
from ftd.units import KiB, MiB, format_bytes

READ_BYTES = 16 * MiB  # one read: long enough for any disk, short enough to notice a cancel
PIECES_PER_READ = 512  # half of what one preadv takes (IOV_MAX)
ASIDE_BYTES = 64 * KiB  # of what is converted: so much is read with its neighbours, more by itself
LEAST_THREADS, MOST_THREADS = 8, 16  # reads in flight: an NVMe drive wants so many; page cache more


Read = Callable[[int, list[memoryview], int], int]  # as os.preadv


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one tensor that lie together in the file and in memory."""

    tensor: TensorInfo
    begin: int  # in the file
    target: memoryview
    done: Callable[[], None] | None = None  # once all of it is there; such a piece is not cut

    @property
    def end(self) -> int:
        return self.begin + len(self.target)


def load_weights(
    checkpoint: Checkpoint,
    architecture: Architecture,
    spec: ModelSpec,
    host_pool: HostPool,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
    *,
    threads: int | None = None,
    read: Read | None = None,
) -> dict[str, Matrix]:
    """Fill the host pool and return the dense tensors by name, as they are stored.

    The checkpoint must have passed ``check``.

    Args:
        progress: called with bytes done and in all, from the reading threads, one at a time.
        cancelled: asked before each read.
        threads: None: as many as a fast disk needs, or one for each core.
        read: where bytes come from, of files that are not all there; None: from the files.
    Raises:
        CheckpointError: a read failed, or a file is no longer the one that was checked.
        NotReady: cancelled.
    """
    jobs, dense = _plan_reads(checkpoint, architecture, spec, host_pool)
    total = sum(job.end - job.begin for job in jobs)
    reader = _Reader(checkpoint.files, progress, cancelled, total, read or os.preadv)
    reader.run(jobs, threads or min(MOST_THREADS, max(LEAST_THREADS, usable_cores())))
    return dense


@without_collector
def _plan_reads(
    checkpoint: Checkpoint, architecture: Architecture, spec: ModelSpec, host_pool: HostPool
) -> tuple[list[Job], dict[str, Matrix]]:
    """All reads in the order of the disk, and the dense tensors that some of them fill."""
    plan = _Plan()
    dense: dict[str, Matrix] = {}
    shapes = architecture.dense_tensors(spec)
    for name, stored in dense_matrices(checkpoint, architecture, spec).items():
        shape = shapes[name]
        if stored.format.scaled:
            packed = PackedMatrix.empty(stored.format, *shape)
            plan.matrix(stored, packed.layout, packed.data.numpy().data)
            dense[name] = packed
        else:
            tensor = torch.empty(shape, dtype=stored.format.dtype)
            plan.section(stored.numbers, tensor.reshape(-1).view(torch.uint8).numpy().data)
            dense[name] = tensor
    for layer in host_pool.moe_layers:
        for expert in range(host_pool.num_experts):
            record = host_pool.record(layer, expert).data
            for name, part in architecture.expert_parts(spec, layer, expert).items():
                matrix = host_pool.layout.matrices[name.removesuffix("_bias")]
                if name.endswith("_bias"):
                    vector = find_vector(checkpoint.tensors, checkpoint.path, part)
                    plan.section(vector, record[matrix.bias_offset :])
                else:
                    plan.matrix(
                        find_matrix(checkpoint.tensors, checkpoint.path, part), matrix, record
                    )
    return plan.jobs(), dense


Fill = Callable[[list[Piece]], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One range of one file: ``run`` reads it by the function it is given."""

    file: Path
    begin: int
    end: int
    run: Callable[[Fill], None]


class _Plan:
    """What is read, and where to: as it is, or into a buffer from which it is converted."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        # ranges of a file → what becomes of them: parts that take turns come from one range
        self._converted: dict[tuple[Path, int], list[tuple[Section, memoryview]]] = {}

    def matrix(self, stored: StoredMatrix, layout: MatrixLayout, record: memoryview) -> None:
        self.section(stored.numbers, record[layout.offset :])
        if stored.scale is not None:
            self.section(stored.scale, record[layout.scale_offset :])
        if stored.factor is not None:
            self.section(stored.factor, record[layout.factor_offset :])

    def section(self, section: Section, target: memoryview) -> None:
        if section.convert is None:
            self.pieces.append(Piece(section.tensor, section.begin, target[: section.nbytes]))
            return
        place = section.tensor.file, section.begin
        self._converted.setdefault(place, []).append((section, target))

    def jobs(self) -> list[Job]:
        """In the order of the disk."""
        pieces, jobs = list(self.pieces), []
        for sections in self._converted.values():
            one = sections[0][0]
            end = one.begin + one.nbytes
            if one.nbytes <= ASIDE_BYTES:  # scales between matrices: many, and a read of many
                pieces.append(_aside(sections, np.empty(one.nbytes, dtype=np.uint8)))
            else:
                jobs.append(Job(one.tensor.file, one.begin, end, partial(_convert, sections)))
        jobs += (
            Job(batch[0].tensor.file, batch[0].begin, batch[-1].end, partial(_read_batch, batch))
            for batch in plan_reads(pieces)
        )
        return sorted(jobs, key=lambda job: (job.file, job.begin))


def _read_batch(batch: list[Piece], fill: Fill) -> None:
    fill(batch)
    for piece in batch:
        if piece.done is not None:
            piece.done()


def _convert(sections: list[tuple[Section, memoryview]], fill: Fill) -> None:
    _read_batch([_aside(sections, _scratch.take(sections[0][0].nbytes))], fill)


class _Scratch(threading.local):
    """A buffer for each thread: memory that is new for each read would be faulted in each time."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, dtype=np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        if len(self._buffer) < nbytes:
            self._buffer = np.empty(nbytes, dtype=np.uint8)
        return self._buffer[:nbytes]


_scratch = _Scratch()


def _aside(sections: list[tuple[Section, memoryview]], buffer: np.ndarray) -> Piece:
    """Sections of one range, read to a buffer, from where each puts what it makes of it."""
    one, _ = sections[0]

    def put() -> None:
        for section, target in sections:
            assert section.convert is not None
            kept = section.convert(torch.from_numpy(buffer)).numpy()
            there = np.frombuffer(target, dtype=np.uint8)[: kept.size].reshape(kept.shape)
            there[...] = kept

    return Piece(one.tensor, one.begin, buffer.data, put)


def plan_reads(pieces: list[Piece]) -> list[list[Piece]]:
    """Batches of pieces, each one contiguous range of one file, in the order of the disk."""
    batches: list[list[Piece]] = []
    for piece in sorted(_cut(pieces), key=lambda p: (p.tensor.file, p.begin)):
        last = batches[-1] if batches else []
        if (
            last
            and len(last) < PIECES_PER_READ
            and last[-1].tensor.file == piece.tensor.file
            and last[-1].end == piece.begin
            and piece.end - last[0].begin <= READ_BYTES
        ):
            last.append(piece)
        else:
            batches.append([piece])
    return batches


def _cut(pieces: list[Piece]) -> Iterator[Piece]:
    """Pieces no longer than one read; empty tensors need none."""
    for piece in pieces:
        if piece.done is not None:
            yield piece
            continue
        for at in range(0, len(piece.target), READ_BYTES):
            yield Piece(piece.tensor, piece.begin + at, piece.target[at : at + READ_BYTES])


class _Reader:
    def __init__(
        self,
        stamps: Mapping[Path, FileStamp],
        progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
        total_bytes: int,
        read: Read,
    ) -> None:
        self._stamps, self._read_into = stamps, read
        self._progress = progress
        self._cancelled = cancelled
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()  # a thread failed: the others need not go on

    def run(self, jobs: list[Job], threads: int) -> None:
        files = sorted({job.file for job in jobs})
        with ExitStack() as open_files:
            fds = {file: open_files.enter_context(open_regular(file)) for file in files}
            for file, fd in fds.items():
                self._refuse_changed(file, fd)
            waiting = iter(jobs)  # of all threads: a future for each of many would take longer
            with ThreadPoolExecutor(threads, thread_name_prefix="ftd-load") as pool:
                reads = [pool.submit(self._read_on, fds, waiting) for _ in range(threads)]
                failed = next((e for r in reads if (e := r.exception())), None)
            if failed:
                raise failed
            for file, fd in fds.items():
                self._refuse_changed(file, fd)

    def _read_on(self, fds: Mapping[Path, int], waiting: Iterator[Job]) -> None:
        for job in waiting:
            if self._stop.is_set():
                return
            self._read(fds[job.file], job)

    def _read(self, fd: int, job: Job) -> None:
        try:
            if self._cancelled():
                raise NotReady(
                    f"loading was cancelled after {format_bytes(self._done_bytes)} "
                    f"of {format_bytes(self._total_bytes)}"
                )
            job.run(partial(self._fill, fd))
        except BaseException:
            self._stop.set()
            raise
        with self._lock:
            self._done_bytes += job.end - job.begin
            self._progress(self._done_bytes, self._total_bytes)

    def _fill(self, fd: int, batch: list[Piece]) -> None:
        begin, end = batch[0].begin, batch[-1].end
        # ask for the whole range at once: the disk sees one long read, not a read-ahead that grows
        os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_WILLNEED)
        at = begin
        while at < end:
            targets = [p.target[max(0, at - p.begin) :] for p in batch if p.end > at]
            piece = next(p for p in batch if p.end > at)
            try:
                count = self._read_into(fd, targets, at)
            except OSError as e:
                raise CheckpointError(
                    f"{piece.tensor.file}: tensor {piece.tensor.name} cannot be read at byte {at}: "
                    f"{e.strerror}",
                    hint="check the disk and its log",
                ) from e
            if count == 0:
                raise CheckpointError(
                    f"{piece.tensor.file} ends at byte {at} within tensor {piece.tensor.name}, "
                    f"which goes up to byte {piece.tensor.begin + piece.tensor.nbytes}",
                    hint="the file was cut off while it was read: download or copy it again",
                )
            at += count
        os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def _refuse_changed(self, file: Path, fd: int) -> None:
        was, now = self._stamps[file], FileStamp.of(os.fstat(fd))
        if was != now:
            raise CheckpointError(
                f"{file} was changed after its header was checked: {was.size} bytes then, "
                f"{now.size} bytes now",
                hint="start again when the download or copy is finished",
            )
