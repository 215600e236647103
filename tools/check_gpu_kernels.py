#!/usr/bin/env python3
"""Checks the Triton kernels on a CUDA machine and times them.

Every operation is compared with TorchOps (in float32, on the CPU), once launched directly and once
as a replayed CUDA graph whose inputs have changed since it was captured; experts lie in GPU memory,
in pinned host memory and in both. Then the operations that decide the speed are timed by graph
replays. Exits 1 if anything differs.

    PYTHONPATH=. python tools/check_gpu_kernels.py [--no-check] [--no-bench]
"""

# ruff: noqa: B008, B023 - every function defined in a loop runs before the loop goes on

from __future__ import annotations

import argparse
import sys
from itertools import product

import torch
from gpu_trials import (
    BF16,
    F32,
    Records,
    failures,
    ops,
    reference,
    routes,
    row,
    run_both,
    seconds,
)
from gpu_trials_delta import bench_delta, check_delta
from gpu_trials_sample import bench_sample, check_sample

from ftd.kernels import blocks
from ftd.kernels.formats import FORMATS, ExpertLayout, expert_layout
from ftd.kernels.ops import Ops
from ftd.kernels.places import places as reference_places
from ftd.kernels.triton.moe_decode import Tuning, moe_decode
from ftd.kernels.triton.places import places
from ftd.kernels.triton.pull import pull


def check_linear() -> None:
    shapes = ((5120, 2048), (2048, 4096), (128, 2048), (1031, 700))
    for act, (outputs, K), T in product((BF16, F32), shapes, (1, 4, 13, 70)):
        weight = torch.randn(outputs, K).to(BF16)
        on_gpu = weight.cuda()
        bias = torch.randn(outputs)
        for out_dtype in {act, F32}:
            run_both(
                f"linear {act} {T}x{K}x{outputs} to {out_dtype}",
                out_dtype,
                lambda x, w=on_gpu, b=bias.cuda(), o=out_dtype: ops.linear(x, w, b, o),
                lambda x, w=weight, b=bias, o=out_dtype: reference.linear(x, w, b, o),
                [(torch.randn(T, K).to(act),) for _ in range(2)],
            )


def check_moe() -> None:
    E, K = 16, 4
    for act, stored, T in (
        (BF16, "bf16", 1),
        (BF16, "bf16", 4),
        (BF16, "bf16", 8),
        (BF16, "bf16", 33),
        (BF16, "bf16", 300),
        (BF16, "f16", 2),
        (F32, "bf16", 1),
        (F32, "bf16", 8),
        (F32, "f32", 40),
    ):
        layout = expert_layout(FORMATS[stored], 512, 320)
        slots = Records(layout, E, on_gpu=True, scale=0.1)
        pool = Records(layout, E, on_gpu=False)
        pool.memory.copy_(slots.memory)
        draws = []
        for _ in range(3):  # routing and residency change
            resident = torch.rand(E) < 0.5
            ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
            ids[torch.rand(T, K) < 0.1] = -1
            address = torch.where(resident, slots.address, pool.address)
            draws.append((torch.randn(T, 512).to(act), ids, torch.rand(T, K), address))

        def compare(how: str = "") -> None:
            run_both(
                f"moe {act} {stored} T={T}{how}",
                act,
                lambda x, ids, w, a: ops.moe(x, ids, w, a, layout),
                lambda x, ids, w, a: reference.moe(x, ids, w, pool.address, layout),
                draws,
            )

        compare()
        if T <= 8:
            check_moe_paths(act, layout, slots, pool, draws[0])
        if T == 300:  # as more tokens than a block has
            most, blocks.PRODUCTS_BYTES = blocks.PRODUCTS_BYTES, 160 * K * 512 * 4
            compare(" in two blocks")
            blocks.PRODUCTS_BYTES = most


def check_moe_paths(
    act: torch.dtype,
    layout: ExpertLayout,
    slots: Records,
    pool: Records,
    draw: tuple[torch.Tensor, ...],
) -> None:
    """Bitwise: slot or host memory, alone or in a batch; and a fill copies whole records."""
    x, ids, weights, _ = (a.cuda() for a in draw)
    resident = ops.moe(x, ids, weights, slots.address.cuda(), layout)
    linked = ops.moe(x, ids, weights, pool.address.cuda(), layout)
    empty = torch.zeros_like(slots.bytes)
    fill = torch.arange(len(empty)) * layout.record_bytes + empty.data_ptr()
    fill[::2] = 0
    filled = ops.moe(x, ids, weights, pool.address.cuda(), layout, fill=fill.cuda())
    alone = [
        ops.moe(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], slots.address.cuda(), layout)
        for t in range(len(x))
    ]
    name = f"moe {act} {layout.format.name} T={len(x)}"
    for what, same in (
        ("over the link", torch.equal(linked, resident)),
        ("with fills", torch.equal(filled, resident)),
        ("row by row", torch.equal(torch.cat(alone), resident)),
    ):
        if not same:
            failures.append(f"{name} {what}")
            print(f"WRONG {name} {what}: not bitwise the same", flush=True)
    used = set(ids.flatten().tolist())
    for expert, stored in enumerate(empty):
        wanted = slots.bytes[expert] if expert % 2 and expert in used else torch.zeros_like(stored)
        if not torch.equal(stored, wanted):
            failures.append(f"{name} fill")
            print(f"WRONG {name}: record {expert} is not filled as it should be", flush=True)
            return


def check_attention() -> None:
    shapes = ((32, 4, 128, 16), (4, 4, 96, 32), (16, 2, 256, 16))
    cases = [
        *product((BF16,), shapes, (None,), (1, 8, 40)),
        *product((F32,), shapes[:1], (100,), (4, 40)),
    ]
    cases += [(BF16, shapes[0], 100, T) for T in (1, 200)]
    for act, (N, NKV, D, page), window, T in cases:
        k, v = torch.randn(2, 96, page, NKV, D).to(act)
        on_gpu = k.cuda(), v.cuda()
        draws = []
        for _ in range(2):
            table = torch.randperm(96)[:90].view(3, 30).int()
            sequence = torch.randint(0, 3, (T,)).sort().values.int()
            position = torch.randint(0, 30 * page, (T,)).int()
            draws.append((torch.randn(T, N, D).to(act), table, sequence, position))
        run_both(
            f"attention {act} N={N} NKV={NKV} D={D} T={T} window={window}",
            act,
            lambda q, t, s, p, kv=on_gpu, d=D, w=window: ops.attention(q, *kv, t, s, p, d**-0.5, w),
            lambda q, t, s, p, kv=(k, v), d=D, w=window: reference.attention(
                q, *kv, t, s, p, d**-0.5, w
            ),
            draws,
        )


def check_rows() -> None:
    for act, T in product((BF16, F32), (1, 8, 70)):
        weight, delta = torch.randn(2048), torch.randn(T, 2048)
        run_both(
            f"rms_norm {act} {T}",
            act,
            lambda x, w=weight.cuda(), a=act: ops.rms_norm(x, w, 1e-6, a),
            lambda x, w=weight, a=act: reference.rms_norm(x, w, 1e-6, a),
            [(torch.randn(T, 2048),) for _ in range(2)],
        )
        run_both(
            f"add_rms_norm {act} {T}",
            act,
            lambda x, d=delta.cuda(), w=weight.cuda(), a=act: ops.add_rms_norm(x, d, w, 1e-6, a)[1],
            lambda x, d=delta, w=weight, a=act: reference.rms_norm(x + d, w, 1e-6, a),
            [(torch.randn(T, 2048),) for _ in range(2)],
        )
        for interleaved in (False, True):
            run_both(
                f"rope {act} {T}",
                act,
                lambda x, c, s, i=interleaved: ops.rope(x.clone(), c, s, i),
                lambda x, c, s, i=interleaved: reference.rope(x.clone(), c, s, i),
                [(torch.randn(T, 32, 128).to(act), torch.rand(T, 64), torch.rand(T, 64))],
            )
        pages = torch.zeros(2, 16, 16, 4, 128).to(act)
        norms = torch.randn(128), torch.randn(128)
        place = torch.randperm(256)[:T]

        def split(ops: Ops, qkv: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            """q, then the pages: q and what was written, as one tensor."""
            q_norm, k_norm, cos, sin, place, k, v = rest
            q = ops.split_heads(qkv, 32, (q_norm, k_norm), 1e-6, (cos, sin), False, place, k, v)
            return torch.cat([q.flatten(), k.flatten(), v.flatten()])

        turn = torch.rand(T, 64), torch.rand(T, 64)
        inv_freq = 1e6 ** -(torch.arange(0, 128, 2) / 128)
        run_both(
            f"split_heads {act} {T}",
            act,
            lambda *a: split(ops, *a),
            lambda *a: split(reference, *a),
            [(torch.randn(T, 40, 128).to(act), *norms, *turn, place, *pages) for _ in range(2)],
        )
        run_both(
            f"route {T}",
            F32,
            lambda x, a: torch.cat(ops.route(x, 8, True, a), dim=1),
            lambda x, a: torch.cat(reference.route(x, 8, True, a), dim=1),
            [(torch.randn(T, 128) * 3, torch.rand(T) < 0.8) for _ in range(2)],
        )
        run_both(
            f"turns {T}",
            F32,
            lambda p, f=inv_freq.cuda(): torch.cat(ops.turns(p, f, 1.25)),
            lambda p: torch.cat(reference.turns(p, inv_freq, 1.25)),
            [(torch.randint(0, 200_000, (T,)).int(),) for _ in range(2)],
        )
        run_both(
            f"silu_mul {act} {T}",
            act,
            ops.silu_mul,
            reference.silu_mul,
            [(torch.randn(T, 768).to(act), torch.randn(T, 768).to(act)) for _ in range(2)],
        )


def check_places() -> None:
    for B in (1, 4, 8):
        run_both(
            f"places {B}",
            F32,
            lambda p, t: torch.stack([part.double() for part in places(p, t, 16, 3)]),
            lambda p, t: torch.stack([part.double() for part in reference_places(p, t, 16, 3)]),
            [
                (
                    torch.randint(-40, 16 * 30, (B,)).clamp(min=-1),
                    torch.randperm(B * 30).view(B, 30).int(),
                )
                for _ in range(2)
            ],
        )


def check_pull() -> None:
    for words in (1, 100, 16_384, 3_000_001):
        host = torch.randint(-(2**31), 2**31, (words,)).int()
        pinned, target = host.pin_memory(), torch.zeros(words + 3, dtype=torch.int32).cuda()
        pull(pinned, target[:words])
        if not torch.equal(target.cpu(), torch.nn.functional.pad(host, (0, 3))):
            failures.append(f"pull {words}")


def check_gates() -> None:
    for act, T in product((BF16, F32), (1, 70)):
        run_both(
            f"sigmoid_mul {act} {T}",
            act,
            lambda both: ops.sigmoid_mul(both[0], both[1]),
            lambda both: reference.sigmoid_mul(both[0], both[1]),
            [(torch.randn(2, T, 16, 256).to(act),) for _ in range(2)],
        )
        run_both(
            f"add_gated {T}",
            F32,
            ops.add_gated,
            reference.add_gated,
            [(torch.randn(T, 2048), torch.randn(T, 2048), torch.randn(T, 1)) for _ in range(2)],
        )


# ---- times


def bench_linear() -> None:
    for outputs, K in ((5120, 2048), (4096, 2048), (2048, 4096), (128, 2048), (151936, 2048)):
        num = max(2, min(16, (300 << 20) // (outputs * K * 2)))  # more than the cache holds
        weights = torch.randn(num, outputs, K, dtype=BF16, device="cuda")
        for T in (1, 4, 8):
            x = torch.randn(T, K, dtype=BF16, device="cuda")
            s = seconds(lambda i, x=x, w=weights: ops.linear(x, w[i % len(w)], None, F32))
            row(f"linear T={T} {K} to {outputs}", s, outputs * K * 2)
        if outputs == 5120:
            x = torch.randn(1, K, dtype=BF16, device="cuda")
            row("  cuBLAS T=1", seconds(lambda i, w=weights: x @ w[i % len(w)].T), outputs * K * 2)
        del weights


def bench_moe_decode() -> None:
    E, K, layout = 128, 8, expert_layout(FORMATS["bf16"], 2048, 768)
    slots = Records(layout, E, on_gpu=True)
    pool = Records(layout, E, on_gpu=False)
    resident, linked = slots.address.cuda(), pool.address.cuda()
    mixed = torch.where(torch.arange(E) % 4 < 3, slots.address, pool.address).cuda()

    def bench(what: str, T: int, address: torch.Tensor, tuning: Tuning, rounds: int) -> None:
        drawn = list(routes(T, E, K, 16))
        x = torch.randn(T, 2048, dtype=BF16, device="cuda")
        distinct = sum(len(ids.unique()) for ids, _ in drawn[:rounds]) / len(drawn[:rounds])
        s = seconds(lambda i: moe_decode(x, *drawn[i % 16], address, layout, tuning=tuning), rounds)
        row(f"moe T={T} {what}", s, distinct * layout.payload_bytes)

    for T, rows, warps in (
        (1, 4, 4),
        (1, 8, 4),
        (1, 4, 8),
        (1, 2, 4),
        (1, 8, 8),
        (4, 4, 4),
        (8, 4, 4),
    ):
        bench(f"resident rows={rows} warps={warps}", T, resident, Tuning(rows, 2048, 0, warps), 16)
    for rows, programs, warps in (
        (4, 0, 4), (4, 8, 4), (4, 16, 4), (8, 4, 4), (8, 16, 4), (4, 4, 4), (4, 0, 8),
        (4, 16, 8), (2, 16, 2), (4, 32, 2),
    ):  # fmt: skip
        what = f"over the link rows={rows} programs={programs} warps={warps}"
        bench(what, 1, linked, Tuning(rows, 2048, programs, warps), 4)
    bench("6 of 8 resident", 1, mixed, Tuning(), 8)
    bench("6 of 8 resident, programs=32", 1, mixed, Tuning(programs=32), 8)
    bench("over the link", 4, linked, Tuning(), 2)
    staging = torch.zeros_like(slots.bytes)
    fill = (torch.arange(E) * layout.record_bytes + staging.data_ptr()).cuda()
    ids, weights = next(routes(1, E, K, 1))
    x = torch.randn(1, 2048, dtype=BF16, device="cuda")
    s = seconds(lambda i: moe_decode(x, ids, weights, linked, layout, fill), 4)
    row("moe T=1 over the link with fills", s, K * layout.payload_bytes)


def bench_moe_prefill() -> None:
    E, K, layout = 128, 8, expert_layout(FORMATS["bf16"], 2048, 768)
    address = Records(layout, E, on_gpu=True).address.cuda()
    for T in (64, 256, 512, 2048, 8192):
        ids, weights = next(routes(T, E, K, 1))
        x = torch.randn(T, 2048, dtype=BF16, device="cuda")
        s = seconds(lambda i: ops.moe(x, ids, weights, address, layout), 4)
        row(f"moe T={T} resident", s, flops=6 * T * K * 2048 * 768)


def bench_attention() -> None:
    N, NKV, D, page = 32, 4, 128, 16
    pages = 32768 // page
    k, v = torch.randn(2, pages * 4, page, NKV, D, dtype=BF16, device="cuda")
    for B, length in ((1, 300), (1, 2048), (1, 8192), (1, 32768), (4, 8192), (8, 2048)):
        table = torch.randperm(pages * 4)[: 4 * pages].view(4, pages).int().cuda().repeat(2, 1)
        position = torch.full((B,), length - 1, dtype=torch.int32, device="cuda")
        sequence = torch.arange(B, dtype=torch.int32, device="cuda")
        q = torch.randn(B, N, D, dtype=BF16, device="cuda")
        s = seconds(lambda i: ops.attention(q, k, v, table, sequence, position, 0.09))
        row(f"attention decode B={B} at {length}", s, B * length * NKV * D * 4)
    for T, before in ((64, 2048), (512, 0), (2048, 0), (8192, 0)):
        table = torch.randperm(pages * 4)[:pages].view(1, pages).int().cuda()
        position = torch.arange(before, before + T, dtype=torch.int32, device="cuda")
        q = torch.randn(T, N, D, dtype=BF16, device="cuda")
        sequence = torch.zeros(T, dtype=torch.int32, device="cuda")
        s = seconds(lambda i: ops.attention(q, k, v, table, sequence, position, 0.09), 4)
        row(f"attention prefill {T} behind {before}", s, flops=4 * N * D * T * (before + T / 2))


def bench_rows() -> None:
    x = torch.randn(1, 2048, device="cuda")
    weight = torch.randn(2048, device="cuda")
    row("add_rms_norm", seconds(lambda i: ops.add_rms_norm(x, x, weight, 1e-6, BF16)), 2048 * 14)
    logits = torch.randn(1, 128, device="cuda")
    row("route 8 of 128", seconds(lambda i: ops.route(logits, 8, True)), 512)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-bench", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    if not arguments.no_check:
        for check in (
            check_rows,
            check_moe,
            check_attention,
            check_linear,
            check_places,
            check_pull,
            check_gates,
            check_delta,
            check_sample,
        ):
            check()
            print(f"{check.__name__}: {len(failures)} wrong so far", flush=True)
    if not arguments.no_bench:
        print(torch.cuda.get_device_name())
        for bench in (
            bench_linear, bench_moe_decode, bench_moe_prefill, bench_attention, bench_delta,
            bench_rows, bench_sample,
        ):  # fmt: skip
            bench()
            torch.cuda.empty_cache()
    print("all checks passed" if not failures else f"{len(failures)} WRONG")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
