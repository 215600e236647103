"""The GPU's part of an expert that the CPU computes, too: interpreted, against the reference."""

from __future__ import annotations

import pytest
import torch
from packed_weights import random_records

pytest.importorskip("triton")

from ftd.kernels import divide as reference
from ftd.kernels.activation import GPT_OSS, SILU
from ftd.kernels.cpu.service import Mailbox
from ftd.kernels.divide import new_shared
from ftd.kernels.formats import FORMATS
from ftd.kernels.reference import TorchOps
from ftd.kernels.triton import divide as kernels
from ftd.kernels.triton.moe_decode import Tuning
from ftd.kernels.triton.ops import CudaOps

E, K, H, INNER, SPLIT = 3, 2, 32, 288, 2
F32, BF16 = torch.float32, torch.bfloat16


def shared_of(layout, address, part):
    mailbox = Mailbox(8, K, H, F32, pin=False)
    shared = new_shared(address[None].contiguous(), 1, (1 << 60, 1 << 61), mailbox, layout)
    shared.both.copy_(torch.tensor([SPLIT, part * layout.part_rows]))
    return shared


def drawn(tokens, act):
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)]).int()
    ids[0, 0] = SPLIT if SPLIT not in ids[0] else ids[0, 0]
    ids[-1, -1] = -1 if tokens > 1 else ids[-1, -1]
    return torch.randn(tokens, H).to(act), ids


@pytest.mark.parametrize(
    ("name", "tokens", "act", "programs"),
    [*((name, 1, F32, 0) for name in FORMATS), ("bf16", 3, BF16, 2), ("nvfp4", 3, BF16, 0)],
    ids=str,
)
def test_the_gpus_part_matches_the_reference(name, tokens, act, programs):
    torch.manual_seed(tokens)
    full = name not in ("f16", "f32")
    layout, _records, address = random_records(name, H, INNER, E, bias=full)
    activation = GPT_OSS if full else SILU
    ops = CudaOps(Tuning(rows=16, programs=programs))
    for part in {1, layout.parts - 1}:
        shared, (x, here) = shared_of(layout, address, part), drawn(tokens, act)
        mine = kernels.products(ops, shared, 0, x, here, layout, activation)
        want = reference.products(TorchOps(), shared, 0, x, here, layout, activation)
        used = here.flatten() >= 0
        limit = (2e-6 if act == F32 else 1e-2) * want[used].abs().max()
        assert (mine - want)[used].abs().max() <= limit, part


def test_other_routes_do_not_change_by_a_bit():
    layout, _records, address = random_records("bf16", H, INNER, E)
    x, here = drawn(2, BF16)
    shared, ops = shared_of(layout, address, 1), CudaOps(Tuning(rows=16))
    mine = kernels.products(ops, shared, 0, x, here, layout, SILU)
    whole = ops.route_products(x, here, address, layout, SILU)
    others = (here.flatten() >= 0) & (here.flatten() != SPLIT)
    assert torch.equal(mine[others], whole[others])


@pytest.mark.parametrize("name", ["bf16", "mxfp4", "fp8"])
def test_what_the_cpu_computes_is_not_read(name):
    layout, records, address = random_records(name, H, INNER, E)
    shared, (x, here) = shared_of(layout, address, 1), drawn(1, F32)
    ops, cut = CudaOps(Tuning(rows=16)), layout.part_rows
    before = kernels.products(ops, shared, 0, x, here, layout, SILU)
    for m, rows in ((layout.gate, True), (layout.up, True), (layout.down, False)):
        bytes_ = records[SPLIT, m.offset : m.offset + m.data_bytes].view(m.rows, -1)
        if rows:
            bytes_[:cut] = 0x7F  # a NaN of bf16
        else:
            bytes_[:, : bytes_.shape[1] * cut // m.columns] = 0x7F
    after = kernels.products(ops, shared, 0, x, here, layout, SILU)
    used = here.flatten() >= 0
    assert torch.equal(before[used], after[used])
