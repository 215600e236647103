#!/usr/bin/env python3
"""How near the CPU kernels come to the machine's own read bandwidth.

One burst computes one MoE layer of random experts from a pool far larger than the caches (2 MiB
pages where the kernel grants them); the next reads as many bytes of other experts as plainly as
the processor can, with the same threads. Bursts take turns, so that noise meets both alike, and a
pair gives one share. The head (--vocab rows) is measured the same way.

    python tools/bench_cpu_experts.py                       # sizes of Qwen3-30B-A3B, bf16
    python tools/bench_cpu_experts.py --threads 14 --format bf16 fp8 mxfp4 nvfp4 int4 --vocab 0
"""

from __future__ import annotations

import argparse
import json
import mmap
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ftd.kernels.activation import SILU
from ftd.kernels.cpu import native
from ftd.kernels.cpu.calibration import calibrate
from ftd.kernels.cpu.native import NativeOps
from ftd.kernels.formats import (
    FORMATS,
    ExpertLayout,
    Matrix,
    MatrixLayout,
    PackedMatrix,
    expert_layout,
    matrix_layout,
)

GIB = 1 << 30
EXPERTS_PER_LAYER = 128


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--experts-per-token", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=151936, help="rows of the head; 0: none")
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=["bf16"])
    parser.add_argument("--act", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--same", action="store_true", help="all tokens choose the same experts")
    parser.add_argument("--threads", type=int, help="the caller included")
    parser.add_argument("--pin", action="store_true", help="each worker on one processor")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--library", type=Path, help="from check_cpu_kernels.py --build")
    parser.add_argument("--prefetch", type=int, help="bytes ahead; default: calibrated")
    parser.add_argument("--calibrate-seconds", type=float, default=2.0, help="for each format")
    parser.add_argument("--pool-gib", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each line")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def huge_memory(num_bytes: int) -> torch.Tensor:
    """Zeroed bytes on 2 MiB pages where the system grants them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # the tensor keeps the mapping alive


def expert_pool(layout: ExpertLayout, pool_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Records of random weights and their addresses."""
    count = max(EXPERTS_PER_LAYER, pool_bytes // layout.record_bytes)
    memory = huge_memory(count * layout.record_bytes).view(count, layout.record_bytes)
    record = random_record(layout)
    for expert in memory:
        expert.copy_(record)
    return memory, memory.data_ptr() + torch.arange(count) * layout.record_bytes


def random_record(layout: ExpertLayout) -> torch.Tensor:
    record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
    for matrix in layout.matrices.values():
        put_matrix(record, matrix)
    return record


def put_matrix(record: torch.Tensor, matrix: MatrixLayout) -> None:
    """Random weights of about 0.02 for one matrix of a record."""
    fmt, count = matrix.format, matrix.data_bytes

    def put(offset: int, numbers: torch.Tensor) -> None:
        stored = numbers.flatten().view(torch.uint8)
        record[offset : offset + len(stored)] = stored

    if not fmt.scaled:
        put(matrix.offset, (torch.randn(matrix.rows, matrix.columns) * 0.02).to(fmt.dtype))
        return
    if fmt.bits == 8:
        # as checkpoints scale them: the largest of a block is 448, subnormal numbers are rare
        put(matrix.offset, (torch.randn(count) * 100).clamp(-448, 448).to(fmt.dtype))
    else:
        put(matrix.offset, torch.randint(256, (count,), dtype=torch.uint8))
    assert fmt.scale_dtype is not None
    power_of_two = fmt.scale_dtype is torch.uint8  # e8m0: 2^(code - 127)
    size = 121 if power_of_two else 0.0002 if fmt.bits == 8 else 0.02
    scale = torch.full(matrix.scale_shape, size)
    put(matrix.scale_offset, scale.to(fmt.scale_dtype))
    if fmt.factor:
        put(matrix.factor_offset, torch.ones(1))


class Burst(NamedTuple):
    """What is timed, and how many bytes it reads; made ready before the clock starts."""

    run: Callable[[], object]
    num_bytes: int


class Timing(NamedTuple):
    gb_per_s: float
    disturbed: bool  # the scheduler took a core away meanwhile


def timed(ops: NativeOps, burst: Burst) -> Timing:
    """One burst. The workers are awake, as they are within a step."""
    ops.pool.wake()
    time.sleep(1e-4)
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    begin = time.perf_counter()
    burst.run()
    took = time.perf_counter() - begin
    disturbed = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw != switches
    return Timing(burst.num_bytes / took / 1e9, disturbed)


def paired(
    ops: NativeOps, kernel: Callable[[], Burst], read: Callable[[int], Burst], seconds: float
) -> dict[str, float]:
    """Alternates kernel and read of as many bytes; GB/s of both and the share, over the pairs.

    Pairs in which another process took a core away are left out, unless that leaves too few.
    """
    pairs: list[tuple[Timing, Timing]] = []
    kernel().run()
    deadline = time.perf_counter() + seconds
    while len(pairs) < 8 or time.perf_counter() < deadline:
        burst = kernel()
        pairs.append((timed(ops, burst), timed(ops, read(burst.num_bytes))))
    calm = [pair for pair in pairs if not (pair[0].disturbed or pair[1].disturbed)]
    used = calm if len(calm) >= 8 else pairs
    rates, reads = ([timing.gb_per_s for timing in side] for side in zip(*used, strict=True))
    shares = [100 * a / b for a, b in zip(rates, reads, strict=True)]
    low, *_, high = quantiles(shares, n=10)
    return {
        "GB/s": median(rates),
        "GB/s p90": quantiles(rates, n=10)[-1],
        "read GB/s": median(reads),
        "read GB/s p90": quantiles(reads, n=10)[-1],
        "share %": median(shares),
        "share % p10": low,
        "share % p90": high,
        "pairs": len(used),
        "pairs left out": len(pairs) - len(used),
    }


def bench_experts(
    ops: NativeOps,
    layout: ExpertLayout,
    address: torch.Tensor,
    batch: int,
    args: argparse.Namespace,
) -> dict[str, float]:
    act = getattr(torch, args.act)
    x = torch.randn(batch, layout.hidden).to(act)
    per_token = args.experts_per_token
    weights = torch.full((batch, per_token), 1.0 / per_token)
    y = torch.empty(batch, layout.hidden)

    def layer() -> Burst:
        first = int(torch.randint(address.numel() - EXPERTS_PER_LAYER + 1, ()))
        here = address[first : first + EXPERTS_PER_LAYER]
        rows = [torch.randperm(EXPERTS_PER_LAYER)[:per_token] for _ in range(batch)]
        ids = torch.stack(rows[:1] * batch if args.same else rows).to(torch.int32)
        num_bytes = len(ids.unique()) * layout.payload_bytes
        return Burst(ops.moe_call(x, ids, weights, here, layout, SILU, y), num_bytes)

    def read(num_bytes: int) -> Burst:
        count = num_bytes // layout.payload_bytes
        records = address[torch.randint(address.numel(), (count,))]
        return Burst(lambda: ops.read(records, layout.payload_bytes), num_bytes)

    return paired(ops, layer, read, args.seconds)


def bench_head(ops: NativeOps, name: str, batch: int, args: argparse.Namespace) -> dict[str, float]:
    fmt = FORMATS[name]
    layout, num_bytes = matrix_layout(fmt, args.vocab, args.hidden)
    record, head_bytes = huge_memory(num_bytes), layout.payload_bytes
    put_matrix(record, layout)
    weight: Matrix = PackedMatrix(layout, record)
    if not fmt.scaled:
        weight = record.view(fmt.dtype).view(args.vocab, args.hidden)
    address = torch.tensor([record.data_ptr()])
    x = torch.randn(batch, args.hidden).to(getattr(torch, args.act))
    return paired(
        ops,
        lambda: Burst(lambda: ops.linear(x, weight, out_dtype=torch.float32), head_bytes),
        lambda num_bytes: Burst(lambda: ops.read(address, num_bytes), num_bytes),
        args.seconds,
    )


def bench_format(
    ops: NativeOps, name: str, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Its lines by their names. Sets the prefetch distances."""
    layout = expert_layout(FORMATS[name], args.hidden, args.inner)
    _memory, address = expert_pool(layout, int(args.pool_gib * GIB))
    if args.prefetch is None:
        act = getattr(torch, args.act)
        seconds = args.calibrate_seconds
        calibrate(ops, layout, address, act, args.experts_per_token, seconds)
    else:
        ops.set_prefetch(layout, args.prefetch, args.prefetch)
    distance = "/".join(f"{b / 1024:g}" for b in ops.prefetch_bytes or ())
    lines = {
        f"{name} x {b}, {distance} KiB": bench_experts(ops, layout, address, b, args)
        for b in args.batch
    }
    if args.vocab:
        lines[f"{name} head {args.vocab}"] = bench_head(ops, name, 1, args)
    return lines


def main() -> int:
    args = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ops = native.load(args.isa, args.threads, pin=args.pin, library=args.library)
    if ops is None:
        print(native.unavailable_reason(args.library), file=sys.stderr)
        return 1
    results = {name: bench_format(ops, name, args) for name in args.format}
    facts = {
        "isa": ops.name,
        "threads": ops.pool.threads,
        "act": args.act,
        "expert": f"{args.hidden}x{args.inner}",
    }
    ops.close()
    if args.json:
        print(json.dumps({**facts, "results": results}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{'':24} {'GB/s':>6} {'p90':>6}   {'read':>6} {'p90':>6}   share (p10 .. p90)")
    for lines in results.values():
        for name, r in lines.items():
            print(
                f"{name:24} {r['GB/s']:6.1f} {r['GB/s p90']:6.1f}   {r['read GB/s']:6.1f} "
                f"{r['read GB/s p90']:6.1f}   {r['share %']:3.0f} % ({r['share % p10']:.0f} .. "
                f"{r['share % p90']:.0f}), {r['pairs']:.0f} pairs, "
                f"{r['pairs left out']:.0f} disturbed"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
