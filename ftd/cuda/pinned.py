"""Host memory made readable by kernels and DMA, or the reason why it is not: the filled pool first.

Registering goes piece by piece, by several threads; every piece ends at a record's end, since one
copy must not cross two registrations. Refused (locked-memory limits of a container, WSL), the pool
stays ordinary memory: then no kernel may read it, and missed experts are copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from ftd.experts.host_pool import HostPool
from ftd.units import GiB

from .driver import register_host, unregister_host

PIECE_BYTES = 1 * GiB
THREADS = 4  # the system's part, touching page tables, does not get faster beyond


@dataclass(slots=True)
class Registration:
    """What is registered; ``reason`` says why nothing is."""

    reason: str = ""
    _addresses: list[int] = field(default_factory=list)

    @property
    def pinned(self) -> bool:
        return not self.reason

    def close(self) -> None:
        """No copy or kernel may use the pool any more. Idempotent."""
        while self._addresses:
            unregister_host(self._addresses.pop())


def register(
    pool: HostPool,
    device: torch.device,
    *,
    register_one: Callable[[int, int], str | None] = register_host,
) -> Registration:
    """Register every record of a filled pool, all or nothing."""
    pieces = [
        piece
        for address, num_bytes, _ in pool.node_ranges()
        for piece in cut(address, num_bytes, pool.layout.record_bytes)
    ]
    return register_pieces(pieces, device, register_one)


def register_pieces(
    pieces: Sequence[tuple[int, int]],  # (address, bytes); no two share a page of memory
    device: torch.device,
    register_one: Callable[[int, int], str | None] = register_host,
) -> Registration:
    """All or nothing."""
    done = Registration()

    def one(piece: tuple[int, int]) -> str | None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return register_one(*piece)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="ftd-pin") as threads:
        reasons = list(threads.map(one, pieces))
    done._addresses = [address for (address, _), reason in zip(pieces, reasons) if reason is None]
    done.reason = next((reason for reason in reasons if reason), "")
    if done.reason:
        done.close()
    return done


def cut(address: int, num_bytes: int, record_bytes: int) -> list[tuple[int, int]]:
    """(address, bytes) of pieces of whole records, of about ``PIECE_BYTES``."""
    records = max(1, PIECE_BYTES // record_bytes) * record_bytes
    return [(address + at, min(records, num_bytes - at)) for at in range(0, num_bytes, records)]
