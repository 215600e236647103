"""What stored numbers mean, against encoders written for the test; and where a record has them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from packed_weights import ENCODERS, random_expert, random_matrix

from ftd.kernels.decode import FP4_VALUES, decode, decode_rows
from ftd.kernels.formats import (
    FORMATS,
    RECORD_ALIGN_BYTES,
    PackedMatrix,
    expert_layout,
    scaled_formats,
    stacked,
)
from ftd.kernels.reference import expert_matrices

SCALED = [row.name for row in scaled_formats()]
SHAPES = [(1, 32), (130, 96), (72, 160), (256, 2880)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(2)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(("rows", "columns"), SHAPES, ids=str)
def test_decodes_what_was_encoded(name, rows, columns):
    packed, weights = random_matrix(name, rows, columns)
    assert torch.equal(decode(packed), weights)
    part = decode_rows(packed.layout, packed.data, rows // 3, rows - rows // 4)
    assert torch.equal(part, weights[rows // 3 : rows - rows // 4])


def test_every_scaled_format_has_an_encoder():
    assert ENCODERS.keys() == set(SCALED)


def test_fp4_codes_in_a_byte_are_even_column_low_and_sign_high():
    packed = PackedMatrix.empty(FORMATS["mxfp4"], 1, 32)
    packed.data.zero_()
    packed.data[:2] = torch.tensor([0x21, 0xF8])  # codes 1, 2, then 8, 15
    packed.data[packed.layout.scale_offset] = 128
    assert decode(packed)[0, :5].tolist() == [1.0, 2.0, -0.0, -12.0, 0.0]
    assert FP4_VALUES[1:3] == (0.5, 1.0)


def test_a_tile_at_the_border_is_partial():
    packed = PackedMatrix.empty(FORMATS["fp8"], 130, 200)
    layout = packed.layout
    assert layout.scale_shape == (2, 2)
    packed.data[: layout.data_bytes] = (
        torch.ones(130 * 200).to(torch.float8_e4m3fn).view(torch.uint8)
    )
    scales = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(torch.uint8)
    packed.data[layout.scale_offset : layout.scale_offset + 16] = scales
    w = decode(packed)
    assert (w[127, 127], w[127, 128], w[128, 0], w[129, 199]) == (1, 2, 3, 4)


@pytest.mark.parametrize("name", [*SCALED, "bf16"])
@pytest.mark.parametrize("bias", [False, True])
def test_parts_of_a_record_do_not_overlap(name, bias):
    layout = expert_layout(FORMATS[name], 96, 160, down=FORMATS["fp8"], bias=bias)
    parts = []
    for m in layout.matrices.values():
        parts.append((m.offset, m.data_bytes))
        if m.format.scaled:
            parts.append((m.scale_offset, m.scale_bytes))
        if m.format.factor:
            parts.append((m.factor_offset, 4))
        if bias:
            parts.append((m.bias_offset, 4 * m.rows))
    parts.sort()
    assert all(a + n <= b for (a, n), (b, _) in pairwise(parts))
    assert all(a % 64 == 0 for a, _ in parts)
    assert sum(parts[-1]) <= layout.record_bytes
    assert layout.record_bytes % RECORD_ALIGN_BYTES == 0
    assert layout.payload_bytes == sum(n for _, n in parts)


@pytest.mark.parametrize("name", SCALED)
def test_a_record_gives_its_matrices(name):
    layout, record, matrices = random_expert(name, 96, 160)
    for found, expected in zip(expert_matrices(record.data_ptr(), layout), matrices, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", SCALED)
def test_stacked_matrices_have_the_rows_of_their_parts(name):
    parts = [random_matrix(name, rows, 160) for rows in (256, 128, 40)]
    joined = stacked([packed for packed, _ in parts])
    if FORMATS[name].factor:
        assert joined is None
        return
    assert joined is not None and joined.shape == (424, 160)
    assert torch.equal(decode(joined), torch.cat([weights for _, weights in parts]))


def test_matrices_of_other_formats_or_with_parts_of_tiles_are_not_stacked():
    fp8, row = random_matrix("fp8", 128, 96)[0], random_matrix("fp8-row", 128, 96)[0]
    assert stacked([fp8, row]) is None
    assert stacked([random_matrix("fp8", 72, 96)[0], fp8]) is None


def test_published_sizes():
    """MiB of an expert of Qwen3-30B-A3B and gpt-oss, as their cards have them."""
    sizes = {n: expert_layout(FORMATS[n], 2048, 768).payload_bytes / 2**20 for n in FORMATS}
    assert sizes["bf16"] == 9.0
    assert sizes["fp8"] == pytest.approx(4.5, abs=0.01)
    assert sizes["nvfp4"] == pytest.approx(2.53, abs=0.01)
    assert sizes["mxfp4"] == pytest.approx(2.39, abs=0.01)
    assert expert_layout(FORMATS["mxfp4"], 2880, 2880).payload_bytes / 2**20 == pytest.approx(
        12.6, abs=0.01
    )
