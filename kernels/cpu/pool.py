"""The threads of the C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int32

from ftd.errors import ConfigError

from .library import Library, PoolPlan
from .topology import Node, default_threads, discover_nodes, place_threads, usable_cores

PARK_AFTER_US = 200  # waking a sleeping worker costs 50 µs: more than a layer's work


class CpuPool:
    """The threads that compute: the caller of an operation and ``threads - 1`` workers.

    Workers spin for ``park_after_us`` after their last work, then sleep.
    """

    def __init__(
        self,
        library: Library,
        threads: int | None = None,
        *,
        pin: bool = False,
        nodes: Sequence[Node] | None = None,
        park_after_us: int = PARK_AFTER_US,
    ) -> None:
        self.threads = default_threads(usable_cores()) if threads is None else threads
        assert self.threads >= 1, self.threads
        self.nodes = tuple(nodes or discover_nodes())
        self.library = library
        placement = place_threads(self.threads, self.nodes, pin)
        cpus = [cpu for group in placement.cpus for cpu in group]
        ends, end = [], 0
        for group in placement.cpus:
            ends.append(end := end + len(group))
        plan = PoolPlan(
            self.threads,
            len(self.nodes),
            (c_int32 * self.threads)(*placement.node),
            (c_int32 * self.threads)(*ends),
            (c_int32 * max(1, len(cpus)))(*cpus),
            park_after_us,
        )
        self.handle = library.functions.ftd_pool_create(byref(plan))
        if not self.handle:
            raise ConfigError(
                f"{self.threads} CPU threads cannot be started",
                hint="lower cpu_threads, or raise the limit on threads (ulimit -u, TasksMax)",
            )

    def wake(self) -> None:
        """Before a step: sleeping workers start spinning."""
        self.library.functions.ftd_pool_wake(self.handle)

    @property
    def finished(self) -> int:
        """Units of work done so far: grows while the pool is alive and busy."""
        return self.library.functions.ftd_pool_finished(self.handle)

    @property
    def parked(self) -> int:
        """Workers asleep."""
        return self.library.functions.ftd_pool_parked(self.handle)

    def place(self, address: int, num_bytes: int, node: int) -> None:
        """Say on which ``Node.number`` memory lies: its experts are computed there first."""
        index = [n.number for n in self.nodes].index(node)
        self.library.functions.ftd_pool_place(self.handle, address, num_bytes, index)

    def close(self) -> None:
        """End the threads; no operation may run or follow."""
        handle, self.handle = self.handle, None
        if handle:
            self.library.functions.ftd_pool_destroy(handle)
