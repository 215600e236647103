"""The C++ kernels of scaled formats against the torch decoders, for each instruction set here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from packed_weights import random_expert, random_matrix, random_records

from ftd.kernels.activation import GPT_OSS, SILU, Activation
from ftd.kernels.cpu import native
from ftd.kernels.cpu.library import Library
from ftd.kernels.cpu.native import NativeOps
from ftd.kernels.decode import decode
from ftd.kernels.formats import scaled_formats
from ftd.kernels.reference import TorchOps

reason = native.unavailable_reason()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no C++ kernels: {reason}")

ISAS = [] if reason else [name for name, here in Library().isas().items() if here]
FORMATS = [row.name for row in scaled_formats()]
REFERENCE = TorchOps()
ACTS = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=ISAS)
def ops(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    ops = native.load(request.param, threads=3)
    assert ops is not None
    yield ops
    ops.close()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_close(got: torch.Tensor, want: torch.Tensor, act: torch.dtype) -> None:
    """To the last bits of the largest: random weights make sums of very different sizes."""
    share = 3e-6 if act == torch.float32 else 1e-2
    assert got.dtype == want.dtype
    assert (got - want).abs().max() <= share * want.abs().max()


def routes(tokens: int, per_token: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(count)[:per_token] for _ in range(tokens)]).to(torch.int32)
    ids[torch.rand(ids.shape) < 0.2] = -1
    return ids, torch.rand(tokens, per_token)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize(
    ("T", "rows", "columns"),
    [(1, 17, 32), (3, 130, 96), (5, 33, 2880), (9, 260, 160), (2, 5, 4096 + 224)],
    ids=str,
)
def test_linear_matches_the_decoded_matrix(ops, name, act, T, rows, columns):
    packed, weights = random_matrix(name, rows, columns)
    x = torch.randn(T, columns).to(act)
    bias = torch.randn(rows)
    want = (x.double() @ weights.double().T + bias).float()
    assert_close(ops.linear(x, packed, bias, torch.float32), want, torch.float32)
    assert torch.equal(decode(packed), weights)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize(
    ("T", "H", "I", "E", "K"),
    [(1, 96, 160, 3, 2), (6, 160, 64, 5, 3), (19, 288, 96, 2, 2)],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True])
def test_moe_matches_reference(ops, name, act, T, H, I, E, K, bias):  # noqa: E741
    layout, _records, address = random_records(name, H, I, E, bias=bias)
    x = torch.randn(T, H).to(act)
    ids, weights = routes(T, K, E)
    activation = GPT_OSS if bias else SILU
    want = REFERENCE.moe(x, ids, weights, address, layout, activation)
    assert_close(ops.moe(x, ids, weights, address, layout, activation), want, act)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("T", [3, 17])
def test_each_code_counts(ops, name, T):
    """Each column alone, so that nothing hides a number that is off."""
    packed, _ = random_matrix(name, 4, 256)
    codes = torch.arange(packed.layout.data_bytes) * 5 % 256
    if packed.layout.format.bits == 8:
        codes[codes % 128 == 127] = 0  # no number
    packed.data[packed.layout.offset :][: len(codes)] = codes.to(torch.uint8)
    weights = decode(packed)
    for first in range(0, 256, T):
        x = torch.eye(256)[first : first + T]
        want = x.double() @ weights.double().T
        got = ops.linear(x.bfloat16(), packed, out_dtype=torch.float32)
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "codes"), [("mxfp4", range(8, 248)), ("nvfp4", range(127))])
@pytest.mark.parametrize("T", [1, 3, 17])
def test_each_scale_counts(ops, name, codes, T):
    """One input of each block alone; e8m0 as far as float32 has normal products."""
    packed, _ = random_matrix(name, 8, 1024)
    blocks = packed.layout.scale_shape[1]
    scales = torch.tensor(codes)[torch.arange(8 * blocks) % len(codes)]
    packed.data[packed.layout.scale_offset :][: len(scales)] = scales.to(torch.uint8)
    weights = decode(packed)
    columns = 1024 // blocks * torch.arange(blocks) + torch.arange(blocks) % 16
    for some in columns.split(T):
        x = torch.zeros(len(some), 1024).bfloat16()
        x[torch.arange(len(some)), some] = 1
        want = x.double() @ weights.double().T
        got = ops.linear(x, packed, out_dtype=torch.float32)
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


def test_down_may_have_another_format(ops):
    layout, _records, address = random_records("mxfp4", 160, 96, 3, down="fp8")
    x, (ids, weights) = torch.randn(4, 160), routes(4, 2, 3)
    want = REFERENCE.moe(x, ids, weights, address, layout)
    assert_close(ops.moe(x, ids, weights, address, layout), want, torch.float32)


@pytest.mark.parametrize("stored", ["f32", "bf16"])
@pytest.mark.parametrize("activation", [GPT_OSS, Activation(limit=0.5), Activation(alpha=0.7)])
def test_biases_and_activations_of_plain_numbers(ops, stored, activation):
    layout, record, (gate, up, down, *biases) = random_expert(stored, 96, 64, bias=True)
    x = torch.randn(3, 96)
    ids, weights = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    g, u = x @ gate.T + biases[0], x @ up.T + biases[1]
    g = g.clamp(max=activation.limit)
    u = u.clamp(-activation.limit, activation.limit) + activation.shift
    want = (u * g * torch.sigmoid(activation.alpha * g)) @ down.T + biases[2]
    address = torch.tensor([record.data_ptr()])
    assert_close(ops.moe(x, ids, weights, address, layout, activation), want, torch.float32)
    found = REFERENCE.moe(x, ids, weights, address, layout, activation)
    assert_close(found, want, torch.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_moe_in_float32_does_not_depend_on_the_batch(ops, name):
    layout, _records, address = random_records(name, 192, 224, 5)
    x, (ids, weights) = torch.randn(40, 192), routes(40, 3, 5)
    together = ops.moe(x, ids, weights, address, layout)
    for T in (1, 2, 3, 4, 5, 7, 8, 9, 17):
        for first in (0, 40 - T):
            rows = slice(first, first + T)
            alone = ops.moe(x[rows], ids[rows], weights[rows], address, layout)
            assert torch.equal(alone, together[rows]), (T, first)


@pytest.mark.parametrize("name", FORMATS)
def test_linear_in_float32_does_not_depend_on_the_batch(ops, name):
    packed, _ = random_matrix(name, 300, 320)
    x = torch.randn(23, 320)
    together = ops.linear(x, packed)
    for T in (1, 2, 4, 5, 9):
        assert torch.equal(ops.linear(x[:T], packed), together[:T]), T
