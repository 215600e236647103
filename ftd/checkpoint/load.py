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
from pathlib import Path

import torch

from ftd.checkpoint.headers import STORED, Checkpoint
from ftd.checkpoint.tensorfile import FileStamp, TensorInfo, open_regular
from ftd.errors import CheckpointError, NotReady
from ftd.experts.host_pool import HostPool
from ftd.model.architecture import Architecture, Part
from ftd.model.spec import ModelSpec
from ftd.units import MiB, format_bytes

READ_BYTES = 16 * MiB  # one read: long enough for any disk, short enough to notice a cancel
PIECES_PER_READ = 512  # half of what one preadv takes (IOV_MAX)
DEFAULT_THREADS = 8  # reads in flight that keep an NVMe drive busy


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one tensor that lie together in the file and in memory."""

    tensor: TensorInfo
    begin: int  # in the file
    target: memoryview

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
) -> dict[str, torch.Tensor]:
    """Fill the host pool and return the dense tensors by name, in their stored dtype.

    The checkpoint must have passed ``check``.

    Args:
        progress: called with bytes done and in all, from the reading threads, one at a time.
        cancelled: asked before each read.
        threads: None: as many as a fast disk needs.
    Raises:
        CheckpointError: a read failed, or a file is no longer the one that was checked.
        NotReady: cancelled.
    """
    dense = {
        name: torch.empty(shape, dtype=STORED[checkpoint.tensors[name].dtype].dtype)
        for name, shape in architecture.dense_tensors(spec).items()
    }
    pieces = [_whole(checkpoint.tensors[name], tensor) for name, tensor in dense.items()]
    pieces += _expert_pieces(checkpoint, architecture, spec, host_pool)
    batches = plan_reads(pieces)
    _Reader(checkpoint.files, progress, cancelled, sum(len(p.target) for p in pieces)).run(
        batches, threads or DEFAULT_THREADS
    )
    return dense


def _whole(info: TensorInfo, tensor: torch.Tensor) -> Piece:
    """A dense tensor, seen as bytes: numpy has no bfloat16."""
    return Piece(info, info.begin, tensor.reshape(-1).view(torch.uint8).numpy().data)


def _expert_pieces(
    checkpoint: Checkpoint, architecture: Architecture, spec: ModelSpec, pool: HostPool
) -> Iterator[Piece]:
    layout = pool.layout
    place = {"gate": layout.gate_offset, "up": layout.up_offset, "down": layout.down_offset}
    for layer in pool.moe_layers:
        for expert in range(pool.num_experts):
            record = pool.record(layer, expert).data
            for name, part in architecture.expert_parts(spec, layer, expert).items():
                info = checkpoint.tensors[part.tensor]
                begin, nbytes = part_range(info, part)
                target = record[place[name] : place[name] + nbytes]
                yield Piece(info, begin, target)


def part_range(info: TensorInfo, part: Part) -> tuple[int, int]:
    """Where in the file the matrix of a part begins, and its bytes."""
    begin, nbytes, shape = info.begin, info.nbytes, info.shape
    if part.index is not None:
        nbytes //= shape[0]
        begin += part.index * nbytes
        shape = shape[1:]
    if part.rows is not None:
        row_bytes = nbytes // shape[0]
        begin += part.rows[0] * row_bytes
        nbytes = (part.rows[1] - part.rows[0]) * row_bytes
    return begin, nbytes


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
        for at in range(0, len(piece.target), READ_BYTES):
            yield Piece(piece.tensor, piece.begin + at, piece.target[at : at + READ_BYTES])


class _Reader:
    def __init__(
        self,
        stamps: Mapping[Path, FileStamp],
        progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
        total_bytes: int,
    ) -> None:
        self._stamps = stamps
        self._progress = progress
        self._cancelled = cancelled
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()  # a thread failed: the others need not go on

    def run(self, batches: list[list[Piece]], threads: int) -> None:
        files = sorted({batch[0].tensor.file for batch in batches})
        with ExitStack() as open_files:
            fds = {file: open_files.enter_context(open_regular(file)) for file in files}
            for file, fd in fds.items():
                self._refuse_changed(file, fd)
            with ThreadPoolExecutor(threads, thread_name_prefix="ftd-load") as pool:
                reads = [pool.submit(self._read, fds[b[0].tensor.file], b) for b in batches]
                failed = next((e for r in reads if (e := r.exception())), None)
            if failed:
                raise failed
            for file, fd in fds.items():
                self._refuse_changed(file, fd)

    def _read(self, fd: int, batch: list[Piece]) -> None:
        if self._stop.is_set():
            return
        try:
            if self._cancelled():
                raise NotReady(
                    f"loading was cancelled after {format_bytes(self._done_bytes)} "
                    f"of {format_bytes(self._total_bytes)}"
                )
            self._fill(fd, batch)
        except BaseException:
            self._stop.set()
            raise
        with self._lock:
            self._done_bytes += batch[-1].end - batch[0].begin
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
                count = os.preadv(fd, targets, at)
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
