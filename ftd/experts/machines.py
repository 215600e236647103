"""Machines the simulator knows: published or measured rates, bytes per second as read.

``link`` is what a kernel reads from pinned host memory, ``dram`` what the CPU reads alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftd.experts.split import Rates

GB = 1e9


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    link_bytes_per_s: float
    dram_bytes_per_s: float
    hbm_bytes_per_s: float
    gemv_share: float = 0.88  # of the DRAM rate that the CPU experts reach
    link_beside_cpu: float = 0.82  # measured on the H200 machine: 41 of 50 GB/s
    dram_per_link_byte: float = 0.9  # measured there: the link takes 41 GB/s, the CPU loses 37
    handshake_s: float = 4e-6  # publish, wake and answer; measured there
    link_fixed_s: float = 3e-6  # first bytes of a read over the link
    layer_fixed_s: float = 90e-6  # attention, router, launches: all-resident decode at 545 tok/s

    def rates(self, expert_bytes: int) -> Rates:
        link, cpu = self.link_bytes_per_s, self.gemv_share * self.dram_bytes_per_s
        shared_link = self.link_beside_cpu * link
        left = self.dram_bytes_per_s - self.dram_per_link_byte * shared_link
        return Rates(
            link_experts_per_s=link / expert_bytes,
            link_fixed_s=self.link_fixed_s,
            cpu_experts_per_s=cpu / expert_bytes,
            cpu_fixed_s=self.handshake_s,
            link_beside_cpu=self.link_beside_cpu,
            cpu_beside_link=max(0.05, left / self.dram_bytes_per_s),
        )


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine("h200", 47.5 * GB, 137 * GB, 4800 * GB),
        Machine("5090-server", 52.7 * GB, 77.3 * GB, 1790 * GB),
        Machine("5090-desktop", 49 * GB, 53.8 * GB, 1790 * GB),
        Machine("4060-laptop", 11.8 * GB, 47.5 * GB, 256 * GB),
        Machine("4090", 25.1 * GB, 63.2 * GB, 1008 * GB),
        Machine("pro-6000", 51.5 * GB, 178 * GB, 1790 * GB),
    )
}
