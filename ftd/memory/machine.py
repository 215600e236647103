"""Facts of the machine that plans and defaults are made of: cores, memory and its limits, NUMA.

Read from /proc and /sys below a root folder, so that a test can draw a machine as files.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ftd.kernels.cpu.topology import discover_nodes, usable_cores
from ftd.units import KiB

UNLIMITED_BYTES = 2**60  # cgroup v1 says "no limit" with a number near 2**63


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int  # this process may use
    total_bytes: int  # of memory in the machine, or allowed by the cgroup
    available_bytes: int  # that this process can still take without swapping or being killed
    limited_by: str  # "the machine", or the file of the cgroup limit that is tighter
    numa_nodes: tuple[int, ...]  # memory nodes with processors that this process may use
    huge_pages: str  # of transparent ones: "always", "madvise", "never", or "unknown"


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that computes, as found before anything of ours lies in its memory."""

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]  # what kernels are compiled for: (9, 0)
    total_bytes: int
    free_bytes: int  # with our context already made


def read_machine(root: Path = Path("/")) -> Machine:
    """Facts as of now."""
    memory = _meminfo(root)
    total, available, by = memory["MemTotal"], memory["MemAvailable"], "the machine"
    for file, limit, used in _cgroup_limits(root):
        total = min(total, limit)
        if (left := max(0, limit - used)) < available:
            available, by = left, str(file)
    return Machine(
        cores=usable_cores(root),
        total_bytes=total,
        available_bytes=available,
        limited_by=by,
        numa_nodes=tuple(node.number for node in discover_nodes(root)),
        huge_pages=_huge_pages(root),
    )


def processor_name(root: Path = Path("/")) -> str:
    """As the system tells it; of those that tell none, the architecture."""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.M)
    return found[1].strip() if found else platform.machine()


def own_bytes(root: Path = Path("/")) -> int:
    """Memory that comes free when this process goes: what it has touched and no file backs."""
    lines = _text(root / "proc/self/status").splitlines()
    found = (re.match(r"Rss(?:Anon|Shmem):\s+(\d+)", line) for line in lines)
    return sum(int(m[1]) * KiB for m in found if m)


def _meminfo(root: Path) -> dict[str, int]:
    lines = (root / "proc/meminfo").read_text().splitlines()
    pairs = (re.match(r"(\w+):\s+(\d+)", line) for line in lines)
    return {m[1]: int(m[2]) * KiB for m in pairs if m}


def _cgroup_limits(root: Path) -> Iterator[tuple[Path, int, int]]:
    """(file, limit, used) of the memory limits of our cgroup and all above it, v1 and v2."""
    for folder in _memory_groups(root):
        for name, usage in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / name)
            used = _number(folder / usage)
            if limit is not None and used is not None and limit < UNLIMITED_BYTES:
                yield folder / name, limit, max(0, used - _reclaimable(folder))


def _memory_groups(root: Path) -> Iterator[Path]:
    """Folders of our cgroup and its parents, of v1's memory controller and of v2."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = [mount, mount / "unified"]
        elif "memory" in controllers.split(","):
            bases = [mount / "memory"]
        else:
            continue
        own = Path(path.lstrip("/"))
        for base in bases:
            # a container sees its own group as the root, though the path is that of the host
            yield from (base / p for p in (own, *own.parents) if (base / p).is_dir())


def _reclaimable(folder: Path) -> int:
    """Page cache that the kernel gives up before it kills: files read once, such as weights."""
    found = dict(
        line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line
    )
    return int(found.get("total_inactive_file", found.get("inactive_file", "0")))


def _huge_pages(root: Path) -> str:
    chosen = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return chosen[1] if chosen else "unknown"


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None  # "max": no limit


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # no such controller, or not for us to see: no limit that we know of
        return ""
