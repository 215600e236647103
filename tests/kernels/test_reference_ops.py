"""TorchOps against independent formulas: float64, torch's own attention, transformers' rope."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ftd.kernels.formats import FORMATS, expert_layout
from ftd.kernels.reference import BLOCK_ROWS, TorchOps, expert_matrices

ops = TorchOps()
ACT = [torch.float32, torch.bfloat16]
WEIGHT = [torch.float32, torch.float16, torch.bfloat16]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


class TestLinear:
    @pytest.mark.parametrize("act", ACT, ids=str)
    @pytest.mark.parametrize("stored", WEIGHT, ids=str)
    @pytest.mark.parametrize(
        ("T", "K", "out"), [(1, 64, 96), (BLOCK_ROWS + 1, 17, 30), (0, 8, 4)], ids=str
    )
    def test_matches_float64(self, T, K, out, act, stored):
        x, weight, bias = (
            torch.randn(T, K).to(act),
            torch.randn(out, K).to(stored),
            torch.randn(out),
        )
        expected = x.double() @ weight.double().T + bias.double()
        y = ops.linear(x, weight, bias)
        assert y.dtype == act
        torch.testing.assert_close(y, expected.to(act), **tolerance(act))
        exact = ops.linear(x, weight, bias, out_dtype=torch.float32)
        torch.testing.assert_close(exact, expected.float(), rtol=1e-5, atol=1e-4)

    def test_slices_of_a_large_matrix_cover_it(self):
        x, weight = torch.randn(3, 2048), torch.randn(301, 2048).bfloat16()  # 3 slices, 1 partial
        y = ops.linear(x, weight)
        torch.testing.assert_close(
            y, (x.double() @ weight.double().T).float(), rtol=1e-4, atol=1e-3
        )

    @pytest.mark.parametrize("stored", WEIGHT, ids=str)
    @pytest.mark.parametrize(("K", "out"), [(64, 512), (17, 30), (1000, 33)], ids=str)
    def test_a_row_does_not_depend_on_the_rows_beside_it(self, K, out, stored):
        x, weight = torch.randn(37, K), torch.randn(out, K).to(stored)
        together = ops.linear(x, weight)
        alone = torch.cat([ops.linear(row[None], weight) for row in x])
        backwards = ops.linear(x.flip(0), weight).flip(0)
        assert torch.equal(together, alone)
        assert torch.equal(together, backwards)


def random_records(num_experts: int, stored: str, hidden: int, inner: int):
    """Records in one buffer, their addresses, and the matrices that were put into them."""
    layout = expert_layout(FORMATS[stored], hidden, inner)
    buffer = torch.zeros(num_experts, layout.record_bytes, dtype=torch.uint8)
    address = buffer.data_ptr() + torch.arange(num_experts) * layout.record_bytes
    matrices = []
    for expert in range(num_experts):
        parts = [
            (torch.randn(inner, hidden) * hidden**-0.5).to(layout.format.dtype),
            (torch.randn(inner, hidden) * hidden**-0.5).to(layout.format.dtype),
            (torch.randn(hidden, inner) * inner**-0.5).to(layout.format.dtype),
        ]
        flat = torch.cat([part.flatten() for part in parts]).view(torch.uint8)
        buffer[expert, : len(flat)] = flat
        matrices.append(parts)
    return layout, buffer, address, matrices


class TestMoe:
    @pytest.mark.parametrize("act", ACT, ids=str)
    @pytest.mark.parametrize("stored", ["bf16", "f16", "f32"])
    def test_matches_a_dense_loop(self, act, stored):
        layout, buffer, address, matrices = random_records(5, stored, hidden=24, inner=20)
        x = torch.randn(7, 24).to(act)
        ids = torch.stack([torch.randperm(5)[:3] for _ in range(7)]).int()
        weights = torch.rand(7, 3)
        expected = torch.zeros(7, 24, dtype=torch.float64)
        for row in range(7):
            for k in range(3):
                gate, up, down = (m.double() for m in matrices[ids[row, k]])
                h = F.silu(gate @ x[row].double()) * (up @ x[row].double())
                expected[row] += weights[row, k].double() * (down @ h)
        y = ops.moe(x, ids, weights, address, layout)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, expected.float(), **tolerance(act))
        assert buffer is not None  # the records outlive the call

    def test_unused_routes_are_left_out_and_may_have_any_weight(self):
        layout, _buffer, address, _ = random_records(4, "f32", hidden=8, inner=12)
        x, weights = torch.randn(3, 8), torch.rand(3, 2)
        ids = torch.tensor([[0, -1], [-1, 2], [-1, -1]], dtype=torch.int32)
        y = ops.moe(x, ids, weights, address, layout)
        assert torch.equal(y[:1], ops.moe(x[:1], ids[:1, :1], weights[:1, :1], address, layout))
        assert torch.equal(y[1:2], ops.moe(x[1:2], ids[1:2, 1:], weights[1:2, 1:], address, layout))
        assert torch.equal(y[2], torch.zeros(8))

    @pytest.mark.parametrize("inner", [12, 32])
    def test_a_row_does_not_depend_on_the_rows_beside_it(self, inner):
        layout, _buffer, address, _ = random_records(6, "bf16", hidden=40, inner=inner)
        x, weights = torch.randn(21, 40), torch.rand(21, 2)
        ids = torch.stack([torch.randperm(6)[:2] for _ in range(21)]).int()
        together = ops.moe(x, ids, weights, address, layout)
        alone = [
            ops.moe(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], address, layout)
            for t in range(21)
        ]
        assert torch.equal(together, torch.cat(alone))

    def test_matrices_are_views_of_the_record(self):
        layout, buffer, address, matrices = random_records(2, "bf16", hidden=16, inner=8)
        down = expert_matrices(int(address[1]), layout)[2]
        assert torch.equal(down, matrices[1][2])
        assert down.data_ptr() == buffer[1].data_ptr() + layout.down_offset


def paged(lengths: list[int], page_tokens: int, kv_heads: int, head_dim: int, act: torch.dtype):
    """Keys and values of some sequences, plain and scattered over pages in a random order."""
    pages_of = [-(-n // page_tokens) for n in lengths]
    order = (torch.randperm(sum(pages_of) + 3)[: sum(pages_of)]).split(pages_of)
    table = torch.zeros(len(lengths), max(pages_of), dtype=torch.int32)
    pages = torch.full(
        (2, sum(pages_of) + 3, page_tokens, kv_heads, head_dim), float("nan"), dtype=act
    )
    plain = []
    for b, length in enumerate(lengths):
        kv = torch.randn(2, length, kv_heads, head_dim).to(act)
        table[b, : pages_of[b]] = order[b]
        place = order[b].repeat_interleave(page_tokens)[:length] * page_tokens
        place = place + torch.arange(length) % page_tokens
        ops.write_kv(kv[0], kv[1], place, pages[0], pages[1])
        plain.append(kv)
    return pages[0], pages[1], table, plain


class TestAttention:
    @pytest.mark.parametrize("act", ACT, ids=str)
    @pytest.mark.parametrize("window", [None, 1, 5, 64])
    @pytest.mark.parametrize(("N", "NKV", "D"), [(4, 2, 16), (3, 3, 8), (6, 1, 32)], ids=str)
    def test_matches_sdpa_with_an_explicit_mask(self, N, NKV, D, window, act):
        lengths = [13, 1, 22]
        k_pages, v_pages, table, plain = paged(lengths, 4, NKV, D, act)
        # rows of different sequences, interleaved: a prompt chunk, and single tokens
        rows = [(0, 7), (2, 21), (0, 8), (1, 0), (0, 9), (0, 10), (0, 11), (0, 12)]
        sequence = torch.tensor([b for b, _ in rows], dtype=torch.int32)
        position = torch.tensor([p for _, p in rows], dtype=torch.int32)
        q = torch.randn(len(rows), N, D).to(act)
        out = ops.attention(q, k_pages, v_pages, table, sequence, position, 0.3, window)
        assert out.dtype == act
        for i, (b, p) in enumerate(rows):
            at = torch.arange(lengths[b])
            mask = (at <= p) & (at > p - (window or 10**6))
            k, v = plain[b].float().transpose(1, 2).repeat_interleave(N // NKV, dim=1)
            expected = F.scaled_dot_product_attention(
                q[i].float()[None, :, None], k[None], v[None], mask[None, None, None], scale=0.3
            )
            torch.testing.assert_close(out[i], expected[0, :, 0].to(act), **tolerance(act))

    @pytest.mark.parametrize("window", [None, 3])
    def test_a_sink_takes_its_share_of_the_probability(self, window):
        """As transformers' gpt_oss: softmax over scores and sink, the sink's share is dropped."""
        k_pages, v_pages, table, plain = paged([9], 4, 2, 16, torch.float32)
        q, sinks = torch.randn(1, 4, 16), torch.tensor([-50.0, 0.0, 1.5, 50.0])
        at = torch.tensor([8], dtype=torch.int32)
        out = ops.attention(q, k_pages, v_pages, table, at * 0, at, 0.3, window, sinks)
        plain_out = ops.attention(q, k_pages, v_pages, table, at * 0, at, 0.3, window)
        torch.testing.assert_close(out[:, 0], plain_out[:, 0])  # the sink weighs nothing
        assert out[:, 3].abs().max() < 1e-6  # the sink weighs all
        k = plain[0][0].transpose(0, 1).repeat_interleave(2, dim=0)[:, 9 - (window or 9) :]
        scores = 0.3 * (k @ q[0, :, :, None]).squeeze(-1)  # [N, S]
        share = scores.exp().sum(-1) / (scores.exp().sum(-1) + sinks.exp())
        torch.testing.assert_close(out, plain_out * share[None, :, None])

    @pytest.mark.parametrize("window", [None, 9])
    def test_rows_pages_and_page_size_change_no_bit(self, window):
        k_pages, v_pages, table, plain = paged([50], 4, 2, 16, torch.float32)
        q = torch.randn(50, 4, 16)
        position = torch.arange(50, dtype=torch.int32)
        sequence = torch.zeros(50, dtype=torch.int32)
        whole = ops.attention(q, k_pages, v_pages, table, sequence, position, 0.25, window)
        for rows in (range(50), [range(0, 7), range(7, 33), range(33, 50)]):
            for part in rows:
                at = (
                    slice(part.start, part.stop)
                    if isinstance(part, range)
                    else slice(part, part + 1)
                )
                alone = ops.attention(
                    q[at], k_pages, v_pages, table, sequence[at], position[at], 0.25, window
                )
                assert torch.equal(alone, whole[at])
        one_page = ops.attention(
            q,
            plain[0][0][None].contiguous(),
            plain[0][1][None].contiguous(),
            torch.zeros(1, 1, dtype=torch.int32),
            sequence,
            position,
            0.25,
            window,
        )
        assert torch.equal(one_page, whole)


class TestNorm:
    @pytest.mark.parametrize("act", ACT, ids=str)
    @pytest.mark.parametrize("shape", [(5, 64), (3, 4, 30), (1, 7)], ids=str)
    def test_matches_float64(self, shape, act):
        x, weight = torch.randn(shape) * 3, torch.randn(shape[-1]).bfloat16()
        wide = x.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        y = ops.rms_norm(x, weight, 1e-6, act)
        torch.testing.assert_close(y, expected.to(act), **tolerance(act))

    @pytest.mark.parametrize("H", [7, 64, 100, 2048])
    def test_a_row_does_not_depend_on_the_rows_beside_it(self, H):
        x, weight = torch.randn(33, H), torch.randn(H)
        together = ops.rms_norm(x, weight, 1e-6, torch.float32)
        alone = torch.cat([ops.rms_norm(row[None], weight, 1e-6, torch.float32) for row in x])
        assert torch.equal(together, alone)


class TestRope:
    @pytest.mark.parametrize("act", ACT, ids=str)
    def test_half_split_matches_transformers(self, act):
        modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
        x = torch.randn(6, 3, 16).to(act)
        angle = torch.rand(6, 8) * 100
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        expected, _ = modeling.apply_rotary_pos_emb(x.float(), x.float(), cos, sin)
        assert ops.rope(x, angle.cos(), angle.sin()) is x  # in place
        torch.testing.assert_close(x, expected.to(act), **tolerance(act))

    def test_interleaved_turns_each_pair_as_a_complex_number(self):
        x, angle = torch.randn(6, 3, 16), torch.rand(6, 8) * 100
        pairs = torch.view_as_complex(x.double().view(6, 3, 8, 2))
        turned = pairs * torch.polar(torch.ones(6, 1, 8).double(), angle[:, None].double())
        expected = torch.view_as_real(turned).view(6, 3, 16).float()
        ops.rope(x, angle.cos(), angle.sin(), interleaved=True)
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_channels_past_the_rotary_ones_pass_through(self, interleaved):
        x, angle = torch.randn(2, 3, 16), torch.rand(2, 4)
        before = x.clone()
        ops.rope(x, angle.cos(), angle.sin(), interleaved)
        assert torch.equal(x[..., 8:], before[..., 8:])
        assert not torch.equal(x[..., :8], before[..., :8])

    def test_a_slice_of_a_wider_tensor_is_changed_in_place(self):
        wide, angle = torch.randn(4, 5, 8), torch.rand(4, 4)
        part = wide[:, :3]
        expected = ops.rope(part.clone(), angle.cos(), angle.sin())
        rest = wide[:, 3:].clone()
        ops.rope(part, angle.cos(), angle.sin())
        assert torch.equal(wide[:, :3], expected)
        assert torch.equal(wide[:, 3:], rest)


class TestSiluMul:
    @pytest.mark.parametrize("act", ACT, ids=str)
    def test_matches_float64(self, act):
        gate, up = torch.randn(5, 33).to(act) * 4, torch.randn(5, 33).to(act)
        expected = gate.double() * torch.sigmoid(gate.double()) * up.double()
        torch.testing.assert_close(ops.silu_mul(gate, up), expected.to(act), **tolerance(act))

    def test_a_row_does_not_depend_on_the_rows_beside_it(self):
        gate, up = torch.randn(64, 13) * 4, torch.randn(64, 13)
        alone = torch.cat([ops.silu_mul(g[None], u[None]) for g, u in zip(gate, up)])
        assert torch.equal(ops.silu_mul(gate, up), alone)
