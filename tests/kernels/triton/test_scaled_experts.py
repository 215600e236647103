"""Experts in scaled formats, with biases and a clamped activation, against TorchOps."""

from __future__ import annotations

import pytest
import torch
from packed_weights import ENCODERS, random_records

pytest.importorskip("triton")

from ftd.kernels.activation import GPT_OSS, SILU
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.kernels.reference import TorchOps
from ftd.kernels.triton.moe_decode import Tuning
from ftd.kernels.triton.ops import CudaOps
from ftd.kernels.triton.scaled import stored, unit_tile
from ftd.kernels.triton.serving import rest_of

E, H, INNER = 4, 160, 96  # one beyond a tile of 128, and no powers of two
F32, BF16 = torch.float32, torch.bfloat16
LIMIT = {F32: 2e-6, BF16: 1e-2}
reference, ops = TorchOps(), CudaOps(Tuning(rows=64))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(4)


def routed(T: int, act: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(E)[:2] for _ in range(T)]).int()
    if T > 1:
        ids[1, 0] = -1
    return torch.randn(T, H).to(act), ids, torch.rand(T, 2)


def assert_near(mine: torch.Tensor, expected: torch.Tensor, act: torch.dtype) -> None:
    assert mine.shape == expected.shape
    assert not mine.isnan().any()
    assert (mine - expected).abs().max() <= LIMIT[act] * expected.abs().max()


@pytest.mark.parametrize(
    ("T", "act", "full"),
    [(1, F32, True), (3, F32, False), (8, BF16, True), (11, F32, True), (11, BF16, False)],
    ids=str,
)
@pytest.mark.parametrize("name", [*ENCODERS, "bf16"])
def test_matches_the_reference(name, T, act, full):
    """``full``: with biases and a clamped activation. T = 11 takes the kernels of prompts."""
    layout, _records, address = random_records(name, H, INNER, E, bias=full)
    activation = GPT_OSS if full else SILU
    x, ids, weights = routed(T, act)
    mine = ops.moe(x, ids, weights, address, layout, activation)
    assert_near(mine, reference.moe(x, ids, weights, address, layout, activation), act)


@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize(("name", "down"), [("nvfp4", "fp8"), ("fp8-row", "bf16"), ("f32", "int4")])
def test_down_in_another_format(name, down, T):
    layout, _records, address = random_records(name, H, INNER, E, down=down)
    x, ids, weights = routed(T, torch.float32)
    mine = ops.moe(x, ids, weights, address, layout)
    assert_near(mine, reference.moe(x, ids, weights, address, layout), torch.float32)


@pytest.mark.parametrize(
    ("name", "down", "bias"), [*((name, None, True) for name in ENCODERS), ("bf16", "nvfp4", False)]
)
def test_fill_stores_whole_records(name, down, bias):
    layout, records, address = random_records(name, H, INNER, E, down=down, bias=bias)
    used = torch.zeros_like(records)
    for start, size in rest_of(layout):  # as published, but gaps and padding hold something too
        used[:, start : start + size] = 1
    for m in layout.matrices.values():
        for start, size in ((m.scale_offset, m.scale_bytes), (m.factor_offset, 4)):
            used[:, start : start + size * m.format.scaled] = 0
    records[used.bool()] = 7
    slots = torch.zeros_like(records)
    fill = slots.data_ptr() + torch.arange(E) * layout.record_bytes
    fill[0] = 0
    x, _, weights = routed(2, torch.float32)
    ids = torch.tensor([[0, 1], [3, 1]], dtype=torch.int32)
    plain = ops.moe(x, ids, weights, address, layout)
    assert torch.equal(ops.moe(x, ids, weights, address, layout, fill=fill), plain)
    assert torch.equal(slots[[1, 3]], records[[1, 3]])
    assert not slots[[0, 2]].any()


def test_each_byte_of_a_record_is_stored_once():
    for name in FORMATS:
        for bias in (False, True):
            layout = expert_layout(FORMATS[name], H, 96, bias=bias)
            times = torch.zeros(layout.record_bytes, dtype=torch.int32)
            for start, size in rest_of(layout):
                times[start : start + size] += 1
            for m in layout.matrices.values():
                times[m.offset : m.offset + m.data_bytes] += 1
                if m.format.scaled and m.format.scale_rows == 1:
                    times[m.scale_offset : m.scale_offset + m.scale_bytes] += 1
                if m.bias_offset is not None:
                    times[m.bias_offset : m.bias_offset + 4 * m.rows] += 1
            assert (times == 1).all(), name


def test_a_row_does_not_depend_on_the_rows_beside_it():
    layout, _records, address = random_records("mxfp4", H, INNER, E, bias=True)
    x, ids, weights = routed(3, torch.bfloat16)
    together = ops.moe(x, ids, weights, address, layout, GPT_OSS)
    for t in range(3):
        row = slice(t, t + 1)
        alone = ops.moe(x[row], ids[row], weights[row], address, layout, GPT_OSS)
        assert torch.equal(alone, together[row])


@pytest.mark.parametrize(
    ("name", "columns", "tile"),
    [
        ("mxfp4", 2048, (4, 64)),
        ("mxfp4", 2880, (8, 32)),  # 90 units: 96 lanes rather than 128
        ("nvfp4", 768, (16, 8)),
        ("fp8", 4096, (4, 128)),
        ("fp8", 70, (16, 8)),
    ],
)
def test_tiles_have_few_lanes_beyond_the_matrix(name, columns, tile):
    matrix = stored(expert_layout(FORMATS[name], 64, columns).down)
    assert unit_tile(4, 2048, matrix) == tile
