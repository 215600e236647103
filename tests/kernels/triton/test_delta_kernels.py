"""The delta rule's kernels in triton's interpreter against TorchOps, states and all."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from ftd.kernels.delta import DeltaWeights, LayerStates, StateRows, StateSpan
from ftd.kernels.reference import TorchOps
from ftd.kernels.triton import delta
from ftd.kernels.triton.ops import CudaOps

SIZES = [(2, 2, 16, 16), (1, 2, 24, 40)]  # NK, NV, DK, DV
CASES = [(SIZES[0], torch.float32), (SIZES[1], torch.bfloat16)]
SLOTS = 7
reference, ops = TorchOps(), CudaOps()


class Layer:
    """Weights, and two copies of random states: for the reference and for the kernels."""

    def __init__(self, NK: int, NV: int, DK: int, DV: int, act: torch.dtype) -> None:
        torch.manual_seed(NV)
        channels = 2 * NK * DK + NV * DV
        self.act, self.channels, self.values = act, channels, NV * DV
        self.weights = DeltaWeights(
            NK, NV, DK, DV,
            conv=torch.randn(4, channels) * 0.5,
            rate=-torch.rand(NV).double(),
            bias=torch.randn(NV).double(),
            norm=torch.randn(DV),
            norm_eps=1e-6,
        )  # fmt: skip
        tail = -(-NV * DK * DV * 4 // 64) * 64
        size = tail + -(-3 * channels * act.itemsize // 64) * 64
        state = torch.randn(SLOTS, NV * DK * DV)
        past = torch.randn(SLOTS, 3 * channels).to(act)
        self.memory = torch.zeros(2, SLOTS, size, dtype=torch.uint8)
        self.memory[:, :, : state.shape[1] * 4] = state.view(torch.uint8)
        self.memory[:, :, tail : tail + past.shape[1] * act.itemsize] = past.view(torch.uint8)
        self.states = [
            LayerStates(slots.data_ptr() + size * torch.arange(SLOTS), 0, tail)
            for slots in self.memory
        ]

    def inputs(self, T: int) -> tuple[torch.Tensor, ...]:
        """Parts of wider rows, as the projections leave them."""
        qkvz, NV = torch.randn(T, self.channels + self.values), self.weights.num_value_heads
        qkv, z = qkvz.to(self.act).tensor_split((self.channels,), dim=1)
        return qkv, z, *(2 * torch.randn(T, 2 * NV)).chunk(2, dim=1)

    def agree(self, inputs: tuple[torch.Tensor, ...], at) -> None:
        mine, theirs = (
            one.delta(*inputs, self.weights, states, at)
            for one, states in zip((ops, reference), self.states)
        )
        near(mine, theirs, self.act)
        tail = self.states[0].tail
        near(*self.memory[:, :, :tail].contiguous().view(torch.float32), self.act)
        assert torch.equal(*self.memory[:, :, tail:])


def near(mine: torch.Tensor, theirs: torch.Tensor, act: torch.dtype) -> None:
    assert mine.dtype == theirs.dtype and mine.isfinite().all()
    limit = 2e-5 if act == torch.float32 else 1.5e-2  # the interpreter cuts where others round
    scale = float(theirs.abs().max())
    torch.testing.assert_close(mine.float(), theirs.float(), rtol=limit, atol=limit * scale)


@pytest.mark.parametrize(("size", "act"), CASES, ids=str)
def test_chunks_of_several_sequences(size, act):
    """One begins, one goes on in fewer rows than a convolution, one passes borders; and padding."""
    layer = Layer(*size, act)
    spans = (
        StateSpan(0, None, ((66, 3),)),
        StateSpan(66, 1, ((68, 4),)),
        StateSpan(68, 2, ((69, 5), (75, 0), (90, 6))),
    )
    inputs = layer.inputs(92)
    inputs[1][90:] = inputs[1][89]
    layer.agree(inputs, spans)


@pytest.mark.parametrize(("size", "act"), CASES, ids=str)
def test_one_row_of_each_sequence(size, act):
    layer = Layer(*size, act)
    inputs = layer.inputs(4)
    inputs[0][1] = float("nan")  # not in use
    at = StateRows(torch.tensor([2, -1, -1, 2]), torch.tensor([0, -1, 5, 1]))
    layer.agree(inputs, at)


def test_rows_one_by_one_are_a_chunk():
    """The kernels among themselves: where a prompt's chunk ends, decode goes on."""
    layer = Layer(*SIZES[0], torch.float32)
    inputs = layer.inputs(20)
    whole = ops.delta(*inputs, layer.weights, layer.states[0], (StateSpan(0, None, ((20, 1),)),))
    states, rows = layer.states[1], []
    begun = (StateSpan(0, None, ((15, 0),)),)
    rows.append(ops.delta(*(x[:15] for x in inputs), layer.weights, states, begun))
    for t, (source, target) in zip(range(15, 20), itertools.cycle([(0, 1), (1, 0)])):
        at = StateRows(torch.tensor([source]), torch.tensor([target]))
        rows.append(ops.delta(*(x[t : t + 1] for x in inputs), layer.weights, states, at))
    near(torch.cat(rows), whole, torch.float32)
    near(*layer.memory[:, 1, : states.tail].contiguous().view(torch.float32), torch.float32)


def test_equal_keys_cancel_nothing():
    """A token said again and again: powers of A would be larger than float32 has digits for."""
    layer = Layer(*SIZES[0], torch.float32)
    inputs = tuple(x[:1].expand(64, -1).contiguous() for x in layer.inputs(1))
    inputs[2].fill_(20.0)  # beta is 1
    inputs[3].fill_(-20.0)  # nothing decays
    layer.agree(inputs, (StateSpan(0, 3, ((64, 1),)),))


def test_decays_that_forget_everything():
    layer = Layer(*SIZES[0], torch.float32)
    inputs = layer.inputs(70)
    inputs[3][::3] = 300.0
    layer.agree(inputs, (StateSpan(0, 3, ((70, 1),)),))


def test_chunks_end_where_a_state_is_wanted():
    spans = StateSpan(2, 7, ((67, 1), (68, 2))), StateSpan(68, None, ((132, 3),))
    chunks, starts = delta.cut(spans)
    assert [tuple(chunk) for chunk in chunks] == [
        (2, 66, 2, 7, -1),
        (66, 67, 2, 7, 1),
        (67, 68, 2, 7, 2),
        (68, 132, 68, -1, 3),
    ]
    assert starts == [0, 3, 4]
