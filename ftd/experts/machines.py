"""Machines the simulator knows: published or measured rates, bytes per second as read.

``link`` is what a kernel reads from pinned host memory, ``dram`` what the CPU reads alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftd.experts.split import Rates

GB = 1e9
PARTS = 12  # of 64 of the 768 inner rows of an expert of Qwen3-30B-A3B
HANDSHAKE_S = 4e-6  # publish, wake and answer inside a graph; measured on the H200 machine


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    link_bytes_per_s: float
    dram_bytes_per_s: float
    hbm_bytes_per_s: float
    gemv_share: float = 0.88  # of the DRAM rate that the CPU experts reach
    hbm_share: float = 0.69  # of the GPU's memory rate that its experts reach: 3.3 of 4.8 TB/s
    hbm_share_of_one_row: float | None = None  # None: the same
    link_beside_cpu: float = 0.82  # the part of its rate that the link keeps
    dram_per_link_byte: float = 0.9  # what the CPU loses while the link reads a byte
    handshake_s: float = HANDSHAKE_S
    cpu_fixed_s: float = 0.0  # of a layer's experts on the CPU, beside the handshake
    cpu_row_fixed_s: float = 0.0  # more of it for each further row
    link_fixed_s: float = 3e-6  # first bytes of a read over the link
    link_asked_s: float = 0.0  # more of it where the CPU is asked; 0: not known
    layer_fixed_s: float = 37e-6  # attention, router, launches, and the head's part
    row_fixed_s: float = 12e-6  # more of it for each further row,
    rows_fixed_s: float = 0.0  # and where there is more than one
    parts: int = PARTS  # of an expert that link and CPU may share

    def rates(self, expert_bytes: float, batch: int = 1) -> Rates:
        link, cpu = self.link_bytes_per_s, self.gemv_share * self.dram_bytes_per_s
        shared_link = self.link_beside_cpu * link
        lost = self.dram_per_link_byte * shared_link / self.dram_bytes_per_s if cpu else 0.0
        return Rates(
            link_experts_per_s=link / expert_bytes,
            link_fixed_s=self.link_fixed_s,
            cpu_experts_per_s=cpu / expert_bytes,
            cpu_fixed_s=self.handshake_s + self.cpu_fixed_s + (batch - 1) * self.cpu_row_fixed_s,
            link_beside_cpu=self.link_beside_cpu,
            cpu_beside_link=max(0.05, 1 - lost),
            link_asked_s=self.link_asked_s,
        )

    def hit_s(self, expert_bytes: float, batch: int = 1) -> float:
        """To compute one resident expert."""
        share = self.hbm_share_of_one_row if batch == 1 else None
        return expert_bytes / ((share or self.hbm_share) * self.hbm_bytes_per_s)

    def fixed_s(self, batch: int) -> float:
        """What a layer takes beside its experts."""
        more = self.rows_fixed_s if batch > 1 else 0.0
        return self.layer_fixed_s + (batch - 1) * self.row_fixed_s + more


def _h200(
    name: str, cpu_bytes_per_s: float, cpu_fixed_s: float, link_beside_cpu: float, lost: float
) -> Machine:
    """Measured with the kernels that serve, as ``ftd --profile`` does: experts of 9 MiB, bf16."""
    return Machine(
        name,
        51.4 * GB,
        cpu_bytes_per_s,
        4800 * GB,
        gemv_share=1.0,
        hbm_share=0.70,  # 3.35 TB/s
        hbm_share_of_one_row=0.90,  # 4.3
        link_beside_cpu=link_beside_cpu,
        dram_per_link_byte=lost,
        handshake_s=0.0,  # in the CPU's fixed time
        cpu_fixed_s=cpu_fixed_s,
        cpu_row_fixed_s=10e-6,  # one expert with 1, 4 and 8 rows: 116, 147 and 184 µs
        link_fixed_s=4e-6,
        link_asked_s=17e-6,  # one expert, 8 to 11 of 12 parts over the link
        layer_fixed_s=42e-6,  # 42, 63, 73 and 91 with 1, 2, 4 and 8 rows
        row_fixed_s=5e-6,
        rows_fixed_s=16e-6,
    )


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _h200("h200", 140 * GB, 30e-6, 0.93, 0.06),  # beside each other 47.8 and 137 GB/s
        _h200("h200-6-threads", 56.8 * GB, 23e-6, 0.975, 0.075),  # 50.8 and 52.3
        Machine("5090-server", 52.7 * GB, 77.3 * GB, 1790 * GB),
        Machine("5090-desktop", 49 * GB, 53.8 * GB, 1790 * GB),
        Machine("4060-laptop", 11.8 * GB, 47.5 * GB, 256 * GB),
        Machine("4090", 25.1 * GB, 63.2 * GB, 1008 * GB),
        Machine("pro-6000", 51.5 * GB, 178 * GB, 1790 * GB),
    )
}
