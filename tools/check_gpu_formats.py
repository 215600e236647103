#!/usr/bin/env python3
"""Checks the Triton kernels of weight formats on a CUDA machine and times them.

As ``check_gpu_kernels``, for experts and dense matrices in each scaled format, and for gpt-oss'
experts with their biases and clamped activation. Compiling takes most of the time: the checks run
side by side, a process for each case, and leave most of what the bench needs in the cache.

    PYTHONPATH=. python tools/check_gpu_formats.py [--only NAME]... [--no-check] [--no-bench]
"""

# ruff: noqa: B008, B023 - every function defined in a loop runs before the loop goes on

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from gpu_trials import BF16, F32, failures, ops, reference, routes, row, run_both, seconds

from ftd.kernels.activation import GPT_OSS, SILU, Activation
from ftd.kernels.formats import FORMATS, ExpertLayout, MatrixLayout, PackedMatrix, expert_layout
from ftd.kernels.triton.moe_decode import Tuning, moe_decode


@dataclass(frozen=True)
class Case:
    layout: ExpertLayout
    E: int
    K: int
    activation: Activation = SILU


CASES = {
    row.name: Case(expert_layout(row, 2048, 768), 128, 8) for row in FORMATS.values() if row.scaled
} | {
    "gpt-oss": Case(expert_layout(FORMATS["mxfp4"], 2880, 2880, bias=True), 32, 4, GPT_OSS),
    "mixed": Case(expert_layout(FORMATS["nvfp4"], 2048, 768, down=FORMATS["fp8"]), 128, 8),
    "bf16-biased": Case(expert_layout(FORMATS["bf16"], 1024, 512, bias=True), 32, 4, GPT_OSS),
}


# ---- random weights


def random_parts(m: MatrixLayout, generator: torch.Generator) -> Iterator[tuple[int, torch.Tensor]]:
    """Where the parts of a matrix lie, and numbers of about the spread of real ones."""
    fmt, (rows, across) = m.format, m.scale_shape if m.format.scaled else (0, 0)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        drawn = torch.rand(shape, generator=generator, device="cuda")
        return drawn * (high - low) + low

    if fmt.bits == 4:
        codes = torch.randint(0, 256, (m.data_bytes,), generator=generator, device="cuda")
        yield m.offset, codes.to(torch.uint8)
    else:
        wide = torch.randn(m.rows, m.columns, generator=generator, device="cuda")
        yield m.offset, (wide * (100 if fmt.bits == 8 else 0.02)).clamp(-448, 448).to(fmt.dtype)
    if fmt.scale_dtype is torch.uint8:
        yield m.scale_offset, uniform(118, 122.9, rows, across).to(torch.uint8)
    elif fmt.scale_dtype is torch.float8_e4m3fn:
        yield m.scale_offset, uniform(20, 448, rows, across).to(fmt.scale_dtype)
        yield m.factor_offset, torch.tensor([3e-5], device="cuda")
    elif fmt.scale_dtype is torch.bfloat16:
        yield m.scale_offset, uniform(1e-3, 8e-3, rows, across).to(fmt.scale_dtype)
    elif fmt.scaled:
        yield m.scale_offset, uniform(1e-4, 3e-4, rows, across)
    if m.bias_offset is not None:
        yield m.bias_offset, uniform(-0.1, 0.1, m.rows)


def fill(record: torch.Tensor, m: MatrixLayout, generator: torch.Generator) -> None:
    for offset, part in random_parts(m, generator):
        numbers = part.contiguous().flatten().view(torch.uint8)
        record[offset : offset + len(numbers)] = numbers


class Pools:
    """The same experts in GPU memory and in pinned host memory."""

    def __init__(self, case: Case) -> None:
        size = case.layout.record_bytes
        generator = torch.Generator("cuda").manual_seed(1)
        self.slots = torch.full((case.E, size), 7, dtype=torch.uint8, device="cuda")
        for record in self.slots:
            for m in case.layout.matrices.values():
                fill(record, m, generator)
        self.host = self.slots.cpu().pin_memory()
        places = torch.arange(case.E) * size
        self.resident = self.slots.data_ptr() + places
        self.linked = self.host.data_ptr() + places


# ---- checks


def check_experts(name: str, case: Case, pools: Pools) -> None:
    for act, T in ((BF16, 1), (BF16, 8), (BF16, 512), (F32, 1), (F32, 12)):
        draws = []
        for ids, weights in routes(T, 16, case.K, 2):  # of 16: the reference is slow
            x = torch.randn(T, case.layout.hidden).to(act)
            somewhere = torch.where(torch.rand(case.E) < 0.5, pools.resident, pools.linked)
            ids, weights = ids.cpu(), weights.cpu()
            ids[torch.rand(ids.shape) < 0.1] = -1
            draws.append((x, ids, weights, somewhere))
        run_both(
            f"experts {name} {act} T={T}",
            act,
            lambda x, ids, w, a: ops.moe(x, ids, w, a, case.layout, case.activation),
            lambda x, ids, w, a: reference.moe(
                x, ids, w, pools.linked, case.layout, case.activation
            ),
            draws,
        )
        if T <= 8 and act == BF16:
            check_paths(f"experts {name} T={T}", case, pools, draws[0])


def check_paths(name: str, case: Case, pools: Pools, draw: tuple[torch.Tensor, ...]) -> None:
    """Bitwise: slot or host memory, alone or in a batch; and a fill copies whole records."""
    x, ids, weights = (a.cuda() for a in draw[:3])

    def run(rows: slice, address: torch.Tensor, to: torch.Tensor | None = None) -> torch.Tensor:
        return ops.moe(
            x[rows], ids[rows], weights[rows], address.cuda(), case.layout, case.activation, to
        )

    everything = slice(None)
    empty = torch.zeros_like(pools.slots)
    to = torch.arange(case.E) * case.layout.record_bytes + empty.data_ptr()
    to[::2] = 0
    resident = run(everything, pools.resident)
    alone = torch.cat([run(slice(t, t + 1), pools.resident) for t in range(len(x))])
    stored = torch.zeros(case.E, dtype=torch.bool, device="cuda")
    stored[ids[ids >= 0].long()] = True
    stored[::2] = False
    for what, same in (
        ("over the link", torch.equal(run(everything, pools.linked), resident)),
        ("with fills", torch.equal(run(everything, pools.linked, to.cuda()), resident)),
        ("row by row", torch.equal(alone, resident)),
        ("records stored whole", torch.equal(empty[stored], pools.slots[stored])),
        ("nothing else stored", not empty[~stored].any()),
    ):
        if not same:
            failures.append(f"{name} {what}")
            print(f"WRONG {name}: {what}", flush=True)


def dense(name: str, rows: int, columns: int, count: int) -> list[PackedMatrix]:
    generator = torch.Generator("cuda").manual_seed(2)
    matrices = [PackedMatrix.empty(FORMATS[name], rows, columns) for _ in range(count)]
    matrices = [m.to(torch.device("cuda")) for m in matrices]
    for matrix in matrices:
        fill(matrix.data, matrix.layout, generator)
    return matrices


def check_dense(name: str) -> None:
    on_gpu = dense(name, 1056, 2048, 1)[0]
    weight, bias = on_gpu.to(torch.device("cpu")), torch.randn(1056)
    for act, T in ((BF16, 1), (BF16, 6), (BF16, 200), (F32, 2), (F32, 40)):
        run_both(
            f"linear {name} {act} T={T}",
            act,
            lambda x, b=bias.cuda(): ops.linear(x, on_gpu, b),
            lambda x: reference.linear(x, weight, bias),
            [(torch.randn(T, 2048).to(act),) for _ in range(2)],
        )


# ---- times


def bench_experts(name: str, case: Case, pools: Pools) -> None:
    E, K, layout, H = case.E, case.K, case.layout, case.layout.hidden
    resident, linked = pools.resident.cuda(), pools.linked.cuda()

    def bench(what: str, T: int, address: torch.Tensor, tuning: Tuning, rounds: int) -> None:
        drawn = list(routes(T, E, K, 16))
        x = torch.randn(T, H, dtype=BF16, device="cuda")
        distinct = sum(len(ids.unique()) for ids, _ in drawn[:rounds]) / rounds
        s = seconds(
            lambda i: moe_decode(
                x, *drawn[i % 16], address, layout, tuning=tuning, activation=case.activation
            ),
            rounds,
        )
        row(f"{name} T={T} {what}", s, distinct * layout.payload_bytes)

    bench("resident", 1, resident, Tuning(), 16)
    for rows, warps in ((2, 4), (8, 4), (4, 8)):
        bench(f"resident rows={rows} warps={warps}", 1, resident, Tuning(rows, warps=warps), 16)
    bench("resident", 8, resident, Tuning(), 8)
    bench("over the link", 1, linked, Tuning(), 4)
    bench("over the link programs=16", 1, linked, Tuning(programs=16), 4)
    empty = torch.zeros_like(pools.slots)
    to = (torch.arange(E) * layout.record_bytes + empty.data_ptr()).cuda()
    ids, weights = next(routes(1, E, K, 1))
    x = torch.randn(1, H, dtype=BF16, device="cuda")
    s = seconds(
        lambda i: moe_decode(
            x, ids, weights, linked, layout, to, activation=case.activation
        ), 4,
    )  # fmt: skip
    row(f"{name} T=1 over the link with fills", s, K * layout.payload_bytes)
    for T in (512, 2048):
        ids, weights = next(routes(T, E, K, 1))
        x = torch.randn(T, H, dtype=BF16, device="cuda")
        s = seconds(lambda i: ops.moe(x, ids, weights, resident, layout, case.activation), 4)
        row(f"{name} T={T} resident", s, flops=6 * T * K * H * layout.inner)


def bench_dense(name: str) -> None:
    matrices = dense(name, 5120, 2048, 32)  # more than the cache holds
    for T in (1, 8, 512, 2048):
        x = torch.randn(T, 2048, dtype=BF16, device="cuda")
        s = seconds(lambda i: ops.linear(x, matrices[i % 32], None, F32))
        num_bytes = matrices[0].layout.payload_bytes if T <= 8 else 0
        row(f"linear {name} T={T} 2048 to 5120", s, num_bytes, 2 * T * 2048 * 5120)


def side_by_side(names: Sequence[str]) -> bool:
    """Check each case in a process of its own; whether all were right."""
    command = [sys.executable, __file__, "--no-bench", "--only"]
    threads = max(1, (os.cpu_count() or 1) // len(names))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    running = [subprocess.Popen([*command, name], env=environment) for name in names]
    codes = [process.wait() for process in running]
    return not any(codes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=CASES, help="one case, or several")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-bench", action="store_true")
    arguments = parser.parse_args()
    names = arguments.only or list(CASES)
    torch.manual_seed(1)
    if not arguments.no_check and len(names) > 1 and not side_by_side(names):
        failures.append("a case, see above")
    for name in names:
        case = CASES[name]
        if not arguments.no_check and len(names) == 1:
            check_experts(name, case, Pools(case))
            if name in FORMATS:
                check_dense(name)
            print(f"{name} checked: {len(failures)} wrong", flush=True)
        if not arguments.no_bench:
            bench_experts(name, case, Pools(case))
            if name in FORMATS:
                bench_dense(name)
        torch.cuda.empty_cache()
    print("all checks passed" if not failures else f"{len(failures)} WRONG")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
