"""CudaOps in triton's interpreter against TorchOps, on awkward shapes and poisoned outputs.

The interpreter computes with the same masks and addresses as a GPU, so what this cannot show is
only speed and the GPU's own rounding: tools/check_gpu_kernels.py.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ftd.kernels import blocks
from ftd.kernels.formats import FORMATS, ExpertLayout, expert_layout
from ftd.kernels.places import places as reference_places
from ftd.kernels.reference import TorchOps
from ftd.kernels.triton import linear, moe_decode
from ftd.kernels.triton.ops import CudaOps
from ftd.kernels.triton.places import places
from ftd.kernels.triton.pull import pull

ACT = [torch.float32, torch.bfloat16]
reference, ops = TorchOps(), CudaOps()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that kernels get holds NaN, or an id that reads far away."""
    torch.manual_seed(1)
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(float("nan") if x.is_floating_point() else 1 << 30)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


def assert_near(mine: torch.Tensor, expected: torch.Tensor, act: torch.dtype) -> None:
    """Equal but for float32 rounding, or in bfloat16 for a last bit here and there."""
    assert mine.dtype == expected.dtype and mine.shape == expected.shape
    limit = 1e-5 if act == torch.float32 else 1e-2
    scale = expected.float().abs().max().clamp(min=1.0) if expected.numel() else torch.tensor(1.0)
    torch.testing.assert_close(
        mine.float(), expected.float(), rtol=limit, atol=float(limit * scale)
    )


class Records:
    """Experts of random weights; ``address`` as the kernels take it."""

    def __init__(self, layout: ExpertLayout, num: int) -> None:
        self.layout, self.num = layout, num
        self._memory = torch.zeros(layout.record_bytes * num + 4096, dtype=torch.uint8)
        start = -self._memory.data_ptr() % 4096
        self.bytes = self._memory[start : start + layout.record_bytes * num].view(num, -1)
        payload = self.bytes[:, : layout.payload_bytes].view(layout.format.dtype)
        payload.copy_(torch.randn(payload.shape) * 0.3)
        self.bytes[:, layout.payload_bytes :] = 7  # padding, which a fill carries along
        self.address = torch.tensor([row.data_ptr() for row in self.bytes])


class TestLinear:
    @pytest.mark.parametrize("act", ACT, ids=str)
    @pytest.mark.parametrize(
        ("T", "K", "out"),
        [
            (1, 70, 33),
            (1, 2100, 5),
            (1, 2104, 5),
            (3, 96, 40),
            (12, 40, 20),
            (20, 64, 40),
            (0, 8, 4),
        ],
        ids=str,
    )
    def test_matches_the_reference(self, T, K, out, act):
        x, weight, bias = (
            torch.randn(T, K).to(act),
            torch.randn(out, K).bfloat16(),
            torch.randn(out),
        )
        for out_dtype in (act, torch.float32):
            mine = ops.linear(x, weight, bias, out_dtype)
            assert_near(mine, reference.linear(x, weight, bias, out_dtype), out_dtype)
        assert_near(ops.linear(x, weight), reference.linear(x, weight), act)

    def test_few_rows_of_a_large_matrix(self, monkeypatch):
        monkeypatch.setattr(linear, "SMALL_OUT", 8)  # as if 30 outputs were many
        x, weight = torch.randn(5, 300).bfloat16(), torch.randn(30, 300).bfloat16()
        assert_near(ops.linear(x, weight), reference.linear(x, weight), torch.bfloat16)


class TestMoe:
    E = 6

    @pytest.mark.parametrize("act", ACT, ids=str)
    @pytest.mark.parametrize(
        ("stored", "T"),
        [("bf16", 1), ("bf16", 5), ("bf16", 21), ("f16", 2), ("f32", 2), ("f16", 9)],
    )
    def test_matches_the_reference(self, T, stored, act):
        records = Records(expert_layout(FORMATS[stored], 48, 40), self.E)
        x, ids, weights = self.routed(T, 3, act, 48)
        mine = ops.moe(x, ids, weights, records.address, records.layout)
        expected = reference.moe(x, ids, weights, records.address, records.layout)
        assert_near(mine, expected, act)

    def test_blocks_of_a_prompt_change_nothing(self, monkeypatch):
        records = Records(expert_layout(FORMATS["bf16"], 48, 40), self.E)
        x, ids, weights = self.routed(50, 3, torch.float32, 48)
        whole = ops.moe(x, ids, weights, records.address, records.layout)
        monkeypatch.setattr(blocks, "PRODUCTS_BYTES", 16 * 3 * 48 * 4)  # of sixteen tokens
        mine = ops.moe(x, ids, weights, records.address, records.layout)
        assert_near(mine, whole, torch.float32)

    def test_tiles_and_programs_change_nothing(self):
        records = Records(expert_layout(FORMATS["bf16"], 48, 40), self.E)
        x, ids, weights = self.routed(3, 3, torch.bfloat16, 48)
        want = moe_decode.moe_decode(x, ids, weights, records.address, records.layout)
        for rows, programs in ((4, 2), (8, 3)):
            tuning = moe_decode.Tuning(rows=rows, columns=32, programs=programs, warps=2)
            mine = moe_decode.moe_decode(
                x, ids, weights, records.address, records.layout, tuning=tuning
            )
            assert_near(mine, want, torch.float32)

    def test_a_row_does_not_depend_on_the_rows_beside_it(self):
        records = Records(expert_layout(FORMATS["bf16"], 48, 40), self.E)
        x, ids, weights = self.routed(4, 3, torch.bfloat16, 48)
        together = ops.moe(x, ids, weights, records.address, records.layout)
        for t in range(4):
            row = slice(t, t + 1)
            alone = ops.moe(x[row], ids[row], weights[row], records.address, records.layout)
            assert torch.equal(alone, together[row])

    def test_an_expert_named_twice_by_a_row_counts_twice(self):
        records = Records(expert_layout(FORMATS["f32"], 48, 40), self.E)
        x, ids, weights = self.routed(2, 3, torch.float32, 48)
        ids[1] = torch.tensor([2, 2, -1])
        mine = ops.moe(x, ids, weights, records.address, records.layout)
        expected = reference.moe(x, ids, weights, records.address, records.layout)
        assert_near(mine, expected, torch.float32)

    def test_unused_routes_are_not_read(self):
        layout = expert_layout(FORMATS["bf16"], 48, 40)
        x, weights = torch.randn(2, 48).bfloat16(), torch.rand(2, 3)
        nowhere = torch.full((self.E,), 64)  # reading it would end the process
        ids = torch.full((2, 3), -1, dtype=torch.int32)
        assert torch.equal(ops.moe(x, ids, weights, nowhere, layout), torch.zeros(2, 48))
        x, ids, weights = x.repeat(10, 1), ids.repeat(10, 1), weights.repeat(10, 1)
        assert torch.equal(ops.moe(x, ids, weights, nowhere, layout), torch.zeros(20, 48))

    @pytest.mark.parametrize("T", [1, 3])
    def test_fill_stores_whole_records_of_the_experts_it_names(self, T):
        layout = expert_layout(FORMATS["bf16"], 48, 40)
        records, slots = Records(layout, self.E), Records(layout, self.E)
        slots.bytes.zero_()
        x, ids, weights = self.routed(T, 3, torch.bfloat16, 48)
        ids[0] = torch.tensor([4, 1, -1])
        fill = torch.zeros(self.E, dtype=torch.int64)
        fill[4], fill[0] = slots.address[2], slots.address[3]
        plain = ops.moe(x, ids, weights, records.address, layout)
        mine = ops.moe(x, ids, weights, records.address, layout, fill=fill)
        assert torch.equal(mine, plain)
        assert torch.equal(slots.bytes[2], records.bytes[4])
        expected = records.bytes[0] if (ids == 0).any() else torch.zeros_like(records.bytes[0])
        assert torch.equal(slots.bytes[3], expected)
        assert not slots.bytes[[0, 1, 4, 5]].any()

    def routed(self, T, K, act, hidden):
        x = torch.randn(T, hidden).to(act)
        ids = torch.stack([torch.randperm(self.E)[:K] for _ in range(T)]).int()
        ids[0, 1] = -1
        return x, ids, torch.rand(T, K)


class TestAttention:
    @pytest.mark.parametrize("act", ACT, ids=str)
    @pytest.mark.parametrize("window", [None, 5])
    @pytest.mark.parametrize("sinks", [False, True])
    @pytest.mark.parametrize(
        ("T", "N", "NKV", "D", "page"),
        [(1, 6, 2, 24, 32), (4, 4, 4, 16, 4), (30, 6, 2, 24, 8)],
        ids=str,
    )
    def test_matches_the_reference(self, T, N, NKV, D, page, sinks, window, act):
        q, k, v, table, sequence, position = self.paged(T, N, NKV, D, page, act)
        logits = 2 * torch.randn(N) if sinks else None
        arguments = (q, k, v, table, sequence, position, D**-0.5, window, logits)
        assert_near(ops.attention(*arguments), reference.attention(*arguments), act)

    @pytest.mark.parametrize("T", [3, 30])
    def test_rows_not_in_use_give_zeros_and_change_no_others(self, T):
        q, k, v, table, sequence, position = self.paged(T, 6, 2, 24, 8, torch.float32)
        sinks = torch.randn(6)
        want = ops.attention(q, k, v, table, sequence, position, 0.2, None, sinks)
        position[1], sequence[2] = -1, -1
        mine = ops.attention(q, k, v, table, sequence, position, 0.2, None, sinks)
        assert not mine[1:3].any()
        assert torch.equal(mine[3:], want[3:]) and torch.equal(mine[0], want[0])

    def paged(self, T, N, NKV, D, page, act):
        k, v = torch.randn(2, 50, page, NKV, D).to(act)
        table = torch.randperm(50)[:48].view(3, 16).int()
        sequence = torch.randint(0, 3, (T,)).sort().values.int()
        position = torch.randint(0, 16 * page, (T,)).int()
        return torch.randn(T, N, D).to(act), k, v, table, sequence, position


class TestRows:
    @pytest.mark.parametrize("act", ACT, ids=str)
    def test_rms_norm(self, act):
        for shape in ((5, 70), (3, 4, 24), (0, 16)):
            x, weight = torch.randn(shape), torch.randn(shape[-1])
            mine = ops.rms_norm(x, weight, 1e-6, act)
            assert_near(mine, reference.rms_norm(x, weight, 1e-6, act), act)

    @pytest.mark.parametrize("act", ACT, ids=str)
    def test_add_rms_norm(self, act):
        x, delta, weight = torch.randn(5, 70), torch.randn(5, 70), torch.randn(70)
        before = x.clone()
        total, mine = ops.add_rms_norm(x, delta, weight, 1e-6, act)
        assert torch.equal(total, before + delta) and torch.equal(x, before)
        assert_near(mine, reference.rms_norm(total, weight, 1e-6, act), act)

    @pytest.mark.parametrize("act", ACT, ids=str)
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("half", [4, 12])
    def test_rope(self, half, interleaved, act):
        x, cos, sin = torch.randn(5, 3, 24).to(act), torch.rand(5, half), torch.rand(5, half)
        mine = ops.rope(x.clone(), cos, sin, interleaved)
        assert_near(mine, reference.rope(x.clone(), cos, sin, interleaved), act)

    def test_write_kv_leaves_rows_without_a_place(self):
        k, v = torch.randn(2, 4, 3, 10)
        pages = torch.zeros(2, 5, 8, 3, 10)
        place = torch.tensor([9, -1, 0, 39])
        ops.write_kv(k, v, place, *pages)
        for written, given in zip(pages, (k, v)):
            want = torch.zeros(40, 3, 10)
            want[[9, 0, 39]] = given[[0, 2, 3]]
            assert torch.equal(written.flatten(0, 1), want)

    @pytest.mark.parametrize("act", ACT, ids=str)
    def test_silu_mul(self, act):
        gate, up = torch.randn(3, 2300).to(act).chunk(2, dim=1)
        assert_near(ops.silu_mul(gate, up), reference.silu_mul(gate, up), act)

    @pytest.mark.parametrize("act", ACT, ids=str)
    @pytest.mark.parametrize("normed", [False, True])
    @pytest.mark.parametrize(("half", "interleaved"), [(0, False), (4, True), (12, False)])
    def test_split_heads(self, half, interleaved, normed, act):
        T, N, NKV, D = 3, 4, 2, 24
        qkv = torch.randn(T, N + 2 * NKV, D).to(act)
        norms = (torch.randn(D), torch.randn(D)) if normed else None
        turn = (torch.rand(T, half), torch.rand(T, half)) if half else None
        place = torch.tensor([9, 39, 0])
        pages = torch.zeros(2, 2, 5, 8, NKV, D).to(act)
        arguments = (qkv, N, norms, 1e-6, turn, interleaved, place)
        mine = ops.split_heads(*arguments, *pages[0])
        assert_near(mine, reference.split_heads(*arguments, *pages[1]), act)
        assert_near(pages[0], pages[1], act)
        place[1] = -1
        pages[0, :, 4] = 0
        ops.split_heads(*arguments, *pages[0])
        assert not pages[0, :, 4].any()

    @pytest.mark.parametrize("normalise", [False, True])
    @pytest.mark.parametrize(("E", "k"), [(60, 10), (16, 1), (5, 5)], ids=str)
    def test_route(self, E, k, normalise):
        logits = torch.randn(4, E)
        logits[1] = 0.0  # all equal
        logits[2, [1, 4]] = 9.0
        (ids, weights), (want_ids, want) = (o.route(logits, k, normalise) for o in (ops, reference))
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want)
        logits[3] = float("nan")
        ids, _ = ops.route(logits, k, normalise)
        assert ((ids >= 0) & (ids < E)).all()

    def test_rows_that_are_not_active_choose_nothing(self):
        logits, active = torch.randn(3, 12), torch.tensor([True, False, True])
        (ids, weights), (want_ids, want) = (
            o.route(logits, 3, True, active) for o in (ops, reference)
        )
        assert torch.equal(ids, want_ids) and (ids[1] == -1).all() and (ids[::2] >= 0).all()
        torch.testing.assert_close(weights, want)

    @pytest.mark.parametrize("scale", [1.0, 1.3465735])
    def test_turns(self, scale):
        position = torch.tensor([0, 1, 77, 40_000, 262_143], dtype=torch.int32)
        inv_freq = 1e6 ** -(torch.arange(0, 48, 2) / 48)
        mine, wanted = (o.turns(position, inv_freq, scale) for o in (ops, reference))
        torch.testing.assert_close(torch.stack(mine), torch.stack(wanted), rtol=1e-7, atol=1e-9)

    @pytest.mark.parametrize("B", [1, 3, 8])
    def test_places_of_rows(self, B):
        position = torch.tensor([40, -1, 0, 15, 16, 31, -1, 47])[:B]
        table = torch.randperm(64).view(8, 8)[:B].int() * 32
        given = position, table, 16, 5
        for mine, wanted in zip(places(*given), reference_places(*given), strict=True):
            assert mine.dtype == wanted.dtype and torch.equal(mine, wanted)


@pytest.mark.parametrize("shape", [(1,), (3, 128), (5, 30_001)], ids=str)
def test_what_is_pulled_is_there(shape):
    for dtype in (torch.int32, torch.int64, torch.float32):
        given = torch.randint(-(2**31), 2**31, (2, *shape)).to(dtype)[0]
        target = torch.full_like(torch.empty(2, *given.shape, dtype=dtype), 7)
        pull(given, target[0])
        assert torch.equal(target[0], given) and (target[1] == 7).all()


@pytest.mark.parametrize("act", ACT, ids=str)
def test_gates_weight_heads_and_rows(act):
    both = torch.randn(5, 3, 2, 40).to(act)
    x, gate = both[:, :, 0].contiguous(), both[:, :, 1]
    assert_near(ops.sigmoid_mul(x, gate), reference.sigmoid_mul(x, gate), act)
    total, y, weight = torch.randn(5, 1100), torch.randn(5, 1100), 3 * torch.randn(5, 1)
    mine = ops.add_gated(total, y, weight)
    assert_near(mine, reference.add_gated(total, y, weight), torch.float32)
