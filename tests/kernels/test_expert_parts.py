"""An expert that two compute: the CPU's part and the rest are what one would have computed."""

from __future__ import annotations

import pytest
import torch
from asked import Asked
from packed_weights import random_records

from ftd.kernels.activation import GPT_OSS, SILU
from ftd.kernels.cpu import native
from ftd.kernels.cpu.library import Library
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.kernels.reference import expert_product

reason = native.unavailable_reason()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no C++ kernels: {reason}")

ISAS = [] if reason else [name for name, here in Library().isas().items() if here]
E, K, H, INNER = 4, 3, 160, 416  # the last part is longer than the others
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module", params=ISAS)
def ops(request):
    ops = native.load(request.param, threads=3)
    yield ops
    ops.close()


@pytest.mark.parametrize("act", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_both_parts_are_the_whole(ops, name, act):
    torch.manual_seed(3)
    full = name not in ("f16", "f32")  # with biases and a clamped activation
    layout, _records, address = random_records(name, H, INNER, E, bias=full)
    activation = GPT_OSS if full else SILU
    for tokens in (1, 8):  # of these all choose expert 2
        x = torch.randn(tokens, H).to(act)
        ids = torch.tensor([[2, 0, -1], [1, 2, 3]]).int().repeat(4, 1)[:tokens]
        for part in range(1, layout.parts):
            cut = part * layout.part_rows
            mine = Asked(ops, layout, address, activation, x, ids, (2, cut))
            assert mine.fault == 0
            for t, k in torch.nonzero(ids >= 0).tolist():
                at = int(address[ids[t, k]])
                whole = expert_product(x[t : t + 1], at, layout, activation)[0]
                got = mine.y[t, k]
                if ids[t, k] == 2:
                    got = got + expert_product(x[t : t + 1], at, layout, activation, cut)[0]
                limit = (3e-6 if act == F32 else 1e-2) * whole.abs().max()
                assert (got - whole).abs().max() <= limit, (name, part, t, k)
            assert mine.y[ids < 0].isnan().all()


def test_what_is_not_asked_for_is_not_read(ops):
    layout, records, address = random_records("bf16", H, INNER, E)
    cut = 3 * layout.part_rows
    gate, up, down = (
        records[2, m.offset : m.offset + m.data_bytes].view(BF16).view(m.rows, m.columns)
        for m in layout.matrices.values()
    )
    gate[cut:] = up[cut:] = down[:, cut:] = float("nan")
    x, ids = torch.randn(1, H).bfloat16(), torch.tensor([[2, -1, -1]]).int()
    assert Asked(ops, layout, address, SILU, x, ids, (2, cut)).y[0, 0].isfinite().all()
    assert Asked(ops, layout, address, SILU, x, ids, (2, cut + 1)).y[0, 0].isnan().all()


def test_a_part_that_cannot_be_is_refused(ops):
    layout, _records, address = random_records("bf16", H, INNER, E)
    x, ids = torch.randn(1, H).bfloat16(), torch.tensor([[2, -1, -1]]).int()
    for rows in (0, INNER + 1):
        assert Asked(ops, layout, address, SILU, x, ids, (2, rows)).fault != 0


def test_parts_are_whole_groups_of_scales_and_the_last_has_what_is_over():
    for fmt in FORMATS.values():
        layout = expert_layout(fmt, H, 2880)
        assert layout.part_rows % max(1, fmt.scale_rows, fmt.scale_columns) == 0
        assert layout.parts * layout.part_rows <= 2880 < (layout.parts + 1) * layout.part_rows
    assert expert_layout(FORMATS["bf16"], H, 768).parts == 12
    assert expert_layout(FORMATS["fp8"], H, 768).parts == 6
    assert expert_layout(FORMATS["fp8"], H, 96).parts == 1, "too short to be divided"
