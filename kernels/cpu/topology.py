"""Cores, quotas and memory nodes of this machine, and how many threads suit them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Node:
    """A memory node: its number and those of its processors that this process may use."""

    number: int
    cpus: tuple[int, ...]


def default_threads(cores: int) -> int:
    """Threads of the pool, the calling thread included.

    The event loop and the rest of the machine keep two cores, one up to four cores. With two cores
    both compute: while a step runs the loop has little to do, and one core alone cannot read memory
    at its full rate.
    """
    if cores <= 2:
        return max(1, cores)
    return cores - 1 if cores <= 4 else cores - 2


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: its affinity mask, or less where a cgroup limits its time."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_cores(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def _cgroup_cores(root: Path) -> float | None:
    """The tightest quota of the process's cgroup and its parents, in cores; None without one."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        unified = not controllers
        if not unified and "cpu" not in controllers.split(","):
            continue
        mount = root / ("sys/fs/cgroup" if unified else "sys/fs/cgroup/cpu")
        parts = Path(path.lstrip("/"))
        for folder in (mount / parts, *(mount / parent for parent in parts.parents)):
            quotas += _quota(folder, unified)
    return min(quotas, default=None)


def _quota(folder: Path, unified: bool) -> list[float]:
    try:
        if unified:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return [int(quota) / int(period)] if int(quota) > 0 else []
    except (OSError, ValueError):  # no such file, or "max"
        return []


def discover_nodes(
    root: Path = Path("/"), usable: frozenset[int] | None = None
) -> tuple[Node, ...]:
    """Memory nodes that have processors we may use; one of them where the system names none."""
    usable = frozenset(os.sched_getaffinity(0)) if usable is None else usable
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = tuple(c for c in _cpu_list((folder / "cpulist").read_text()) if c in usable)
        if cpus:
            nodes.append(Node(int(folder.name.removeprefix("node")), cpus))
    return tuple(sorted(nodes, key=lambda n: n.number)) or (Node(0, tuple(sorted(usable))),)


def _cpu_list(text: str) -> list[int]:
    """``0-3,8`` → 0, 1, 2, 3, 8."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


@dataclass(frozen=True, slots=True)
class Placement:
    """For each thread of a pool its node, an index into the nodes, and its processors, if any."""

    node: tuple[int, ...]
    cpus: tuple[tuple[int, ...], ...]


def place_threads(threads: int, nodes: tuple[Node, ...], pin: bool) -> Placement:
    """Threads over nodes in proportion to their processors.

    Thread 0, the caller, stays where it is. The others keep to their node where there are several
    (else its memory is not near), and to one processor each where ``pin`` asks for it.
    """
    cores = [(n, cpu) for n, node in enumerate(nodes) for cpu in node.cpus]
    chosen = [cores[i * len(cores) // threads] for i in range(threads)]
    cpus: list[tuple[int, ...]] = [()]
    for n, cpu in chosen[1:]:
        cpus.append((cpu,) if pin else nodes[n].cpus if len(nodes) > 1 else ())
    return Placement(tuple(n for n, _ in chosen), tuple(cpus))
