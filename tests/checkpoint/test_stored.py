"""Which format a matrix has, told from names, shapes and types alone; what is refused, and how."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ftd.checkpoint.stored import find_dense, find_matrix, matrix_shape
from ftd.checkpoint.tensorfile import DTYPE_BITS, TensorInfo
from ftd.errors import CheckpointError, UnsupportedModel
from ftd.model.architecture import Part

O, K = 200, 320  # noqa: E741
STEM = "model.layers.0.mlp.experts.3.up_proj."
NAME = STEM + "weight"
PART = Part(NAME, (O, K))


def tensors(**suffixes: tuple[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    found, begin = {}, 0
    for suffix, (dtype, shape) in suffixes.items():
        name = suffix if "." in suffix else STEM + suffix
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        found[name] = TensorInfo(name, dtype, shape, Path(f"shard-{begin}"), begin, size)
        begin += size
    return found


FP8 = ("F8_E4M3", (O, K))
NIBBLES = ("U8", (O, K // 2))
E4M3 = ("F8_E4M3", (O, K // 16))
GOOD = {
    "bf16": {"weight": ("BF16", (O, K))},
    "fp8": {"weight": FP8, "weight_scale_inv": ("F32", (2, 3))},
    "fp8 bf16 tiles": {"weight": FP8, "weight_scale_inv": ("BF16", (2, 3))},
    "fp8 e8m0 tiles": {"weight": FP8, "weight_scale_inv": ("F8_E8M0", (2, 3))},
    "fp8 tiles named otherwise": {"weight": FP8, "weight_scale": ("F32", (2, 3))},
    "fp8-row": {"weight": FP8, "weight_scale": ("BF16", (O, 1))},
    "fp8-row flat": {"weight": FP8, "weight_scale": ("F16", (O,))},
    "fp8-row one": {"weight": FP8, "weight_scale": ("F32", ()), "input_scale": ("F32", ())},
    "nvfp4": {"weight": NIBBLES, "weight_scale": E4M3, "weight_scale_2": ("F32", ())},
    "nvfp4 ct": {
        "weight_packed": NIBBLES,
        "weight_scale": E4M3,
        "weight_global_scale": ("F32", (1,)),
        "input_global_scale": ("F32", (1,)),
    },
    "mxfp4": {"weight_packed": NIBBLES, "weight_scale": ("U8", (O, K // 32))},
    "int4": {
        "weight_packed": ("I32", (O, K // 8)),
        "weight_scale": ("BF16", (O, K // 32)),
        "weight_shape": ("I64", (2,)),
    },
    "int4 in wider groups": {
        "weight_packed": ("I32", (O, K // 8)),
        "weight_scale": ("BF16", (O, K // 64)),
    },
}


@pytest.mark.parametrize("case", GOOD)
def test_the_tensors_beside_it_tell_the_format(case):
    there = tensors(**GOOD[case])
    matrix = find_matrix(there, Path("m"), PART)
    assert matrix.format.name == case.split()[0]
    assert matrix.names == there.keys()
    assert find_dense(there, Path("m"), NAME, (O, K)).format == matrix.format


BAD = {
    "no scale": ({"weight": FP8}, CheckpointError, STEM + "weight_scale is in no file"),
    "no factor": (
        {"weight_packed": NIBBLES, "weight_scale": E4M3},
        CheckpointError,
        STEM + "weight_global_scale is in no file",
    ),
    "tiles of another grid": (
        {"weight": FP8, "weight_scale_inv": ("F32", (2, 2))},
        UnsupportedModel,
        r"\[2, 3\] tiles of 128 x 128, 200 rows, or one scale",
    ),
    "mxfp8": (
        {"weight": FP8, "weight_scale_inv": ("U8", (O, K // 32))},
        UnsupportedModel,
        "weight_scale_inv is stored as U8",
    ),
    "a factor for each row": (
        {"weight": NIBBLES, "weight_scale": E4M3, "weight_scale_2": ("F32", (O,))},
        UnsupportedModel,
        "weight_scale_2 is stored as F32 .* expected one number",
    ),
    "scales of another width": (
        {"weight_packed": NIBBLES, "weight_scale": ("U8", (O, K // 16))},
        CheckpointError,
        "weight_scale has shape",
    ),
    "int4 with float16 scales": (
        {"weight_packed": ("I32", (O, K // 8)), "weight_scale": ("F16", (O, K // 32))},
        UnsupportedModel,
        "weight_scale is stored as F16",
    ),
    "int4 with zero points": (
        {**GOOD["int4"], "weight_zero_point": ("I32", (O // 8, K // 32))},
        UnsupportedModel,
        "weight_zero_point .* an asymmetric quantisation",
    ),
    "int8": (
        {"weight_packed": ("I32", (O, K // 4)), "weight_scale": ("BF16", (O, K // 32))},
        UnsupportedModel,
        r"weight_packed .* expected \[200, 40\] of four bits",
    ),
    "int4 in another order": (
        {**GOOD["int4"], "weight_g_idx": ("I32", (K,))},
        UnsupportedModel,
        "weight_g_idx .* not neighbours",
    ),
    "gptq": ({"qweight": ("I32", (K // 8, O))}, UnsupportedModel, "GPTQ or AWQ"),
    "a scale beside plain numbers": (
        {"weight": ("BF16", (O, K)), "weight_scale": ("F32", ())},
        UnsupportedModel,
        "needs no scale",
    ),
    "bytes without a scale": ({"weight": NIBBLES}, CheckpointError, "has shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_refused_by_name(case):
    suffixes, kind, said = BAD[case]
    with pytest.raises(kind, match=said) as refusal:
        find_matrix(tensors(**suffixes), Path("m"), PART)
    assert STEM in refusal.value.message and refusal.value.hint


def test_scales_of_wider_groups_stand_for_several():
    scale = find_matrix(tensors(**GOOD["int4 in wider groups"]), Path("m"), PART).scale
    stored = torch.randn(O, K // 64).bfloat16()
    kept = scale.convert(stored.flatten().view(torch.uint8)).view(torch.bfloat16)
    assert torch.equal(kept.view(O, K // 32), stored.repeat_interleave(2, 1))


def test_stacked_experts_may_be_spelled_one_by_one():
    part = Part("x.experts.gate_up_proj", (4, 2 * O, K), 3, (O, 2 * O), apart=NAME)
    assert matrix_shape(part) == (O, K)
    assert find_matrix(tensors(**GOOD["nvfp4"]), Path("m"), part).format.name == "nvfp4"
    stacked = tensors(**{"x.experts.gate_up_proj": ("BF16", (4, 2 * O, K))})
    numbers = find_matrix(stacked, Path("m"), part).numbers
    assert (numbers.begin, numbers.nbytes) == ((3 * 2 + 1) * O * K * 2, O * K * 2)


def test_rows_that_take_turns_come_from_one_range():
    name, shape = "x.experts.gate_up_proj", (2, K, 2 * O)  # plain numbers: [E, in, out]
    parts = [Part(name, shape, 1, (i, 2 * O), 2, transposed=True) for i in (0, 1)]
    blocks = tensors(
        **{
            f"{name}_blocks": ("U8", (2, 2 * O, K // 32, 16)),
            f"{name}_scales": ("U8", (2, 2 * O, K // 32)),
        }
    )
    gate, up = (find_matrix(blocks, Path("m"), part) for part in parts)
    assert gate.format.name == "mxfp4"
    assert (gate.numbers.begin, gate.numbers.nbytes) == (up.numbers.begin, up.numbers.nbytes)
    assert gate.numbers.nbytes == O * K
    rows = torch.arange(2 * O, dtype=torch.uint8)[:, None].repeat(1, K // 2)
    assert torch.equal(gate.numbers.convert(rows.flatten()), rows[0::2])
    assert torch.equal(up.numbers.convert(rows.flatten()), rows[1::2])

    plain = tensors(**{name: ("BF16", shape)})
    numbers = torch.randn(shape[1:]).bfloat16()
    for part, first in zip(parts, (0, 1), strict=True):
        found = find_matrix(plain, Path("m"), part).numbers
        assert (found.begin, found.nbytes) == (K * 2 * O * 2, K * 2 * O * 2)
        turned = found.convert(numbers.flatten().view(torch.uint8)).view(torch.bfloat16)
        assert torch.equal(turned.view(O, K), numbers.T[first::2])
