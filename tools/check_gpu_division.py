#!/usr/bin/env python3
"""Checks on a CUDA machine what link, slots and CPU compute together of a layer's experts.

Layers as captured steps have them, replayed with other routing, residency and tables than they were
captured with: whole experts on the link, whole ones on the CPU, one that both share. Compared with
TorchOps in float32 on the CPU. Exits 1 if anything differs.

    PYTHONPATH=. python tools/check_gpu_division.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kernels"))

from packed_weights import random_records

from ftd.cuda.cpu_experts import CpuExperts
from ftd.cuda.division import Division
from ftd.kernels.activation import GPT_OSS, SILU
from ftd.kernels.cpu import native
from ftd.kernels.divide import FETCHED, ON_CPU
from ftd.kernels.reference import TorchOps
from ftd.kernels.triton.ops import CudaOps
from ftd.kernels.unsummed import summed

LAYERS, E, K, HIDDEN, INNER = 2, 12, 4, 512, 416  # the last part is longer than the others
REPLAYS, MOST_ROWS = 12, 8
FORMATS = (("bf16", False), ("fp8", False), ("mxfp4", True), ("nvfp4", False), ("int4", False))
BF16 = torch.bfloat16


class Layers:
    """Two captured layers of so many rows, and what they read."""

    def __init__(self, division: Division, rows: int) -> None:
        self.division = division
        self.x = torch.zeros(LAYERS, rows, HIDDEN, dtype=BF16, device="cuda")
        self.logits = torch.zeros(LAYERS, rows, E, device="cuda")
        self.residual = torch.zeros(rows, HIDDEN, device="cuda")
        self.norm = torch.ones(HIDDEN, device="cuda")
        self.active = torch.ones(rows, dtype=torch.bool, device="cuda")
        self.log = torch.zeros(LAYERS, rows, K, dtype=torch.int32, device="cuda")
        self.here = torch.empty_like(self.log)
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        self.run()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=stream):
            self.y = self.run()

    def run(self) -> torch.Tensor:  # [LAYERS, rows, HIDDEN]
        return torch.stack([self.layer(i) for i in range(LAYERS)])

    def layer(self, i: int) -> torch.Tensor:
        """Added to nothing, with the norm behind: of one row, or by itself."""
        x, logits, log, here = self.x[i], self.logits[i], self.log[i], self.here[i]
        if len(x) == 1:
            weights = self.division.choose(i, x, logits, True, self.active, log, here)
        else:
            ids, weights = self.division.route(logits, K, True, self.active)
            self.division.divide(i, x, ids, self.active, log, here)
        y = self.division.finish(i, x, weights, log, here)
        if len(x) > 1:
            return summed(y)
        assert not isinstance(y, torch.Tensor)
        return y.add_rms_norm(self.residual, self.norm, 1e-6, BF16)[0]


def check(name: str, bias: bool) -> int:
    layout, records, address = random_records(name, HIDDEN, INNER, LAYERS * E, bias=bias)
    pinned, on_gpu = records.pin_memory(), records.cuda()
    offsets = (address - address[0]).view(LAYERS, E)
    host, slots = offsets + pinned.data_ptr(), offsets + on_gpu.data_ptr()
    activation = GPT_OSS if bias else SILU
    threads = native.load(threads=4)
    assert threads is not None, native.unavailable_reason()
    cpu = CpuExperts(threads, host.contiguous(), layout, activation, BF16, MOST_ROWS, K, pin=True)
    ends = (on_gpu.data_ptr(), on_gpu.data_ptr() + on_gpu.numel())
    division = Division(CudaOps(), layout, activation, host.cuda(), ends, cpu)
    shared, wrong, shares = division.shared, 0, 0
    for rows in (1, 2, 4, 8):
        cpu.step_begins()
        layers = Layers(division, rows)
        for _ in range(REPLAYS):
            division.split([(torch.rand(E) * torch.arange(E)).tolist()] * 4)
            resident = torch.rand(LAYERS, E) < torch.rand(())
            shared.address.copy_(torch.where(resident, slots, host))
            x = torch.randn(LAYERS, rows, HIDDEN).to(BF16)
            logits = torch.randn(LAYERS, rows, E)
            routes = [TorchOps().route(of, K, True) for of in logits]
            ids = torch.stack([chosen for chosen, _ in routes])
            layers.x.copy_(x)
            layers.logits.copy_(logits)
            layers.graph.replay()
            torch.cuda.synchronize()
            used = torch.zeros(LAYERS, E, dtype=torch.bool).scatter_(1, ids.flatten(1).long(), True)
            missed = int((used & ~resident).sum())
            report = shared.report.tolist()
            shares += int(shared.both[0]) >= 0
            want = torch.stack(
                [
                    TorchOps().moe(of, *route, at, layout, activation)
                    for of, route, at in zip(x, routes, host)
                ]
            )
            error = float((layers.y.cpu() - want).abs().max() / want.abs().max())
            counted = report[FETCHED] + report[ON_CPU] == missed * layout.parts
            if not error <= 1.5e-2 or not counted:
                wrong += 1
                print(
                    f"WRONG {name}, {rows} rows: error {error:.3g}, counted {counted}", flush=True
                )
        cpu.step_ended()
    torch.cuda.synchronize()
    cpu.close()
    threads.close()
    print(f"{name}: {4 * REPLAYS} replays, {shares} shared an expert, {wrong} wrong", flush=True)
    return wrong


def main() -> int:
    torch.manual_seed(1)
    wrong = sum(check(name, bias) for name, bias in FORMATS)
    print("all checks passed" if not wrong else f"{wrong} WRONG")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
