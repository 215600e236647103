"""Checkpoints whose experts are holes in their files: what stands there is given when it is read.

A model of 64 GB would have to lie in memory twice, as files and as host pool. Of a hollow
checkpoint the headers and all dense weights are real; the experts of every layer are a hole, which
takes no room. A few experts lie beside it in ``experts.bin``, and ``hollow.json`` says which hole
repeats which of its bytes: in each layer, expert e holds the numbers of expert ``e % few``. Every
byte of the model is read to a place of its own, so loading, link and kernels have the full size to
move.

To ``ftd`` alone holes are zeros; ``tools/serve_hollow.py`` is ftd with ``HollowReader``.
"""

from __future__ import annotations

import bisect
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

EXPERTS, HOLES = "experts.bin", "hollow.json"
_EXPERT = re.compile(r"\.experts\.(\d+\.)?")


@dataclass(frozen=True)
class Hole:
    """A range of a file that repeats a range of ``experts.bin``."""

    begin: int
    end: int
    source: int  # where the range begins there
    period: int  # its bytes


def is_expert(tensor: str) -> bool:
    return _EXPERT.search(tensor) is not None


def runs(sizes: Mapping[str, int], begin: int = 0) -> list[tuple[int, int]]:
    """Ranges of experts in a file of these tensors: all separate ones, or one stacked tensor."""
    found: list[tuple[int, int]] = []
    separate_before = False
    for name, nbytes in sizes.items():
        end = begin + nbytes
        if match := _EXPERT.search(name):
            separate = match[1] is not None
            if separate and separate_before:
                found[-1] = (found[-1][0], end)
            else:
                found.append((begin, end))
            separate_before = separate
        else:
            separate_before = False
        begin = end
    return found


def holes(
    whole: Sequence[tuple[int, int]], few: Sequence[tuple[int, int]], share: float
) -> list[Hole]:
    """
    Args:
        whole: the runs of a layer's file.
        few: the same runs of fewer experts, in ``experts.bin``.
        share: how many experts these are, of all.
    """
    made = []
    for (begin, end), (source, stop) in zip(whole, few, strict=True):
        assert round((end - begin) * share) == stop - source, (begin, end, source, stop, share)
        made.append(Hole(begin, end, source, stop - source))
    return made


def write_holes(folder: Path, of_files: Mapping[str, Sequence[Hole]]) -> None:
    kept = {file: [astuple(hole) for hole in found] for file, found in of_files.items() if found}
    (folder / HOLES).write_text(json.dumps(kept))


class HollowReader:
    """``os.preadv`` for files of hollow checkpoints, and of any others."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], tuple[int, list[Hole]]] = {}

    def __call__(self, fd: int, targets: Sequence[memoryview], at: int) -> int:
        """Read on from ``at``, to the border of a hole or of what it repeats at most."""
        experts, found = self._holes_of(fd)
        n = bisect.bisect_right(found, at, key=lambda hole: hole.end)
        if n == len(found):
            return os.preadv(fd, targets, at)
        hole = found[n]
        if at < hole.begin:
            return os.preadv(fd, _first(targets, hole.begin - at), at)
        place = (at - hole.begin) % hole.period
        most = min(hole.end - at, hole.period - place)
        return os.preadv(experts, _first(targets, most), hole.source + place)

    def _holes_of(self, fd: int) -> tuple[int, list[Hole]]:
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino, status.st_mtime_ns
        if key not in self._known:  # two threads may find the same
            file = Path(os.readlink(f"/proc/self/fd/{fd}"))
            self._known[key] = _look(file)
        return self._known[key]


def _look(file: Path) -> tuple[int, list[Hole]]:
    if not (file.parent / HOLES).exists():
        return -1, []
    kept = json.loads((file.parent / HOLES).read_text()).get(file.name, [])
    experts = os.open(file.parent / EXPERTS, os.O_RDONLY | os.O_CLOEXEC) if kept else -1
    return experts, [Hole(*numbers) for numbers in kept]


def _first(targets: Sequence[memoryview], most: int) -> list[memoryview]:
    """As many of them as take ``most`` bytes; the last one in part."""
    taken = []
    for target in targets:
        taken.append(target[:most])
        most -= len(taken[-1])
        if most <= 0:
            break
    return taken
