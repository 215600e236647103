"""The C++ kernels against the torch reference, on awkward shapes, for each instruction set here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ftd.errors import ConfigError
from ftd.kernels.activation import SILU
from ftd.kernels.cpu import native
from ftd.kernels.cpu.calibration import PREFETCH_CHOICES_BYTES, calibrate
from ftd.kernels.cpu.library import Library
from ftd.kernels.cpu.native import NativeOps
from ftd.kernels.delta import delta_scan
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.kernels.reference import TorchOps

reason = native.unavailable_reason()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no C++ kernels: {reason}")

ISAS = [] if reason else [name for name, here in Library().isas().items() if here]
ACTS = [torch.float32, torch.bfloat16]
WEIGHTS = [torch.bfloat16, torch.float16, torch.float32]
REFERENCE = TorchOps()
# a bf16 result may round the other way where sums differ in their last bits: one unit of 8 bits
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-3},
    torch.float16: {"rtol": 2e-3, "atol": 1e-4},
}


@pytest.fixture(scope="module", params=ISAS)
def ops(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    ops = native.load(request.param, threads=3)
    assert ops is not None
    yield ops
    ops.close()


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors start as NaN, so an element that a kernel forgets shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def experts(dtype: torch.dtype, hidden: int, inner: int, count: int):
    """Random records, their addresses and layout; NaN lies between them."""
    fmt = next(f for f in FORMATS.values() if f.dtype == dtype)
    layout = expert_layout(fmt, hidden, inner)
    records = torch.full((count, layout.record_bytes // dtype.itemsize), float("nan"), dtype=dtype)
    weights = torch.randn(count, 3, hidden * inner)
    weights[:, :2] /= hidden**0.5
    weights[:, 2] /= inner**0.5
    records[:, : 3 * hidden * inner] = weights.flatten(1).to(dtype)
    address = records.data_ptr() + torch.arange(count) * layout.record_bytes
    return records, address, layout


def routes(tokens: int, per_token: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts for each token, some routes not in use."""
    ids = torch.stack([torch.randperm(count)[:per_token] for _ in range(tokens)]).to(torch.int32)
    ids[torch.rand(ids.shape) < 0.2] = -1
    return ids, torch.rand(tokens, per_token)


class Paged:
    """Keys and values of some sequences, on pages in random order; NaN where nobody may look."""

    def __init__(self, lengths, kv_heads, head_dim, page_tokens, act):
        width = -(-max(lengths) // page_tokens)
        pages = len(lengths) * width + 1
        self.k = torch.full((pages, page_tokens, kv_heads, head_dim), float("nan"), dtype=act)
        self.v = self.k.clone()
        self.table = torch.randperm(pages - 1).to(torch.int32).view(len(lengths), width) + 1
        for sequence, length in enumerate(lengths):
            for p in range(length):
                page, offset = self.table[sequence, p // page_tokens], p % page_tokens
                self.k[page, offset] = torch.randn(kv_heads, head_dim).to(act)
                self.v[page, offset] = torch.randn(kv_heads, head_dim).to(act)


# ---- linear


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize(
    ("T", "O", "K"),
    [
        (1, 17, 96),
        (2, 1, 200),
        (3, 33, 2880),
        (4, 16, 31),
        (5, 64, 128),
        (8, 40, 768),
        (33, 50, 72),
        (1, 1024, 1056),
        (70, 300, 130),
    ],
    ids=str,
)
def test_linear_matches_reference(ops, T, O, K, act, weight):  # noqa: E741
    x, w = torch.randn(T, K).to(act), (torch.randn(O, K) / K**0.5).to(weight)
    bias = torch.randn(O).to(weight)
    for b, out in ((None, act), (bias, torch.float32)):
        want = REFERENCE.linear(x, w, b, out)
        torch.testing.assert_close(ops.linear(x, w, b, out), want, **TOLERANCE[out])


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_linear_in_float32_is_the_same_for_any_number_of_rows(ops, weight):
    w = torch.randn(45, 328).to(weight)
    x = torch.randn(67, 328)
    together = ops.linear(x, w)
    for T in range(1, 10):
        assert torch.equal(ops.linear(x[:T], w), together[:T]), T
        assert torch.equal(ops.linear(x[T : 2 * T], w), together[T : 2 * T]), T


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_linear_in_float32_is_the_same_wherever_a_row_of_weights_lies(ops, weight):
    w = torch.randn(2100, 200).to(weight)
    x = torch.randn(3, 200)
    together = ops.linear(x, w)
    for first, last in ((0, 1), (5, 22), (1000, 2100)):
        assert torch.equal(ops.linear(x, w[first:last].contiguous()), together[:, first:last])


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_linear_hands_on_nan_and_infinity(ops, act):
    w = torch.randn(20, 96).to(torch.bfloat16)
    x = torch.randn(5, 96).to(act)
    x[2, 95] = float("nan")
    x[3, 0] = float("inf")
    y = ops.linear(x, w)
    assert y[2].isnan().all() and not y[3].isfinite().any()
    assert y[[0, 1, 4]].isfinite().all()


def test_linear_takes_no_rows_at_all(ops):
    assert ops.linear(torch.randn(0, 96), torch.randn(5, 96)).shape == (0, 5)
    assert ops.linear(torch.randn(2, 96), torch.randn(0, 96)).shape == (2, 0)


# ---- experts


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize(
    ("T", "H", "I", "E", "K"),
    [
        (1, 96, 200, 5, 2),
        (2, 200, 96, 9, 4),
        (5, 64, 17, 3, 3),
        (9, 130, 72, 8, 2),
        (33, 96, 80, 4, 2),
        (1, 2880, 64, 4, 4),
        (70, 64, 136, 2, 2),
    ],
    ids=str,
)
def test_moe_matches_reference(ops, T, H, I, E, K, act, weight):  # noqa: E741
    _records, address, layout = experts(weight, H, I, E)
    x = torch.randn(T, H).to(act)
    ids, weights = routes(T, K, E)
    want = REFERENCE.moe(x, ids, weights, address, layout)
    # h is rounded to act on the way: in bf16 a different last bit moves a product by 2^-8
    tolerance = (
        {"rtol": 2e-5, "atol": 2e-5} if act == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    )
    torch.testing.assert_close(ops.moe(x, ids, weights, address, layout), want, **tolerance)


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_moe_in_float32_does_not_depend_on_the_batch(ops, weight):
    _records, address, layout = experts(weight, 200, 232, 7)
    x = torch.randn(40, 200)
    ids, weights = routes(40, 3, 7)
    together = ops.moe(x, ids, weights, address, layout)
    for T in (1, 2, 3, 4, 5, 6, 7, 8, 17):
        for first in (0, 9, 40 - T):
            rows = slice(first, first + T)
            alone = ops.moe(x[rows], ids[rows], weights[rows], address, layout)
            assert torch.equal(alone, together[rows]), (T, first)


def test_moe_in_float32_does_not_depend_on_the_batch_when_y_is_computed_piece_by_piece(ops):
    _records, address, layout = experts(torch.bfloat16, 2048, 16, 8)
    x = torch.randn(300, 2048)  # 300 · 8 products of 2048 floats: more than are held at once
    ids = torch.stack([torch.randperm(8) for _ in range(300)]).to(torch.int32)
    weights = torch.rand(300, 8)
    together = ops.moe(x, ids, weights, address, layout)
    for row in (0, 150, 299):
        one = slice(row, row + 1)
        assert torch.equal(ops.moe(x[one], ids[one], weights[one], address, layout), together[one])


def test_moe_in_float32_does_not_depend_on_where_an_expert_lies(ops):
    records, address, layout = experts(torch.bfloat16, 96, 80, 6)
    x = torch.randn(5, 96)
    ids, weights = routes(5, 3, 6)
    before = ops.moe(x, ids, weights, address, layout)
    copy = records.flip(0).contiguous()
    moved = copy.data_ptr() + torch.arange(5, -1, -1) * layout.record_bytes
    assert torch.equal(ops.moe(x, ids, weights, moved, layout), before)


def test_moe_without_any_route_is_zero(ops):
    _records, address, layout = experts(torch.bfloat16, 96, 80, 3)
    ids = torch.full((4, 2), -1, dtype=torch.int32)
    y = ops.moe(torch.randn(4, 96), ids, torch.rand(4, 2), address, layout)
    assert torch.equal(y, torch.zeros(4, 96))


def test_moe_adds_the_same_expert_twice_when_told_to(ops):
    _records, address, layout = experts(torch.float32, 64, 48, 3)
    x, weights = torch.randn(2, 64), torch.rand(2, 3)
    ids = torch.tensor([[1, 1, 1], [2, 0, 2]], dtype=torch.int32)
    want = REFERENCE.moe(x, ids, weights, address, layout)
    torch.testing.assert_close(
        ops.moe(x, ids, weights, address, layout), want, rtol=2e-5, atol=2e-5
    )


def test_products_of_routes_are_the_parts_of_the_sum(ops):
    _, address, layout = experts(torch.bfloat16, 128, 48, 6)
    for tokens in (1, 5, 40):
        x = torch.randn(tokens, 128)
        ids, weights = routes(tokens, 3, 6)
        y = torch.full((tokens * 3, 128), 7.0)
        ops.route_products(x, ids, address, layout, SILU, y)
        used = ids.flatten() >= 0
        assert (y[~used] == 7.0).all()
        y[~used] = 0.0
        total = (y.view(tokens, 3, 128) * weights[..., None]).sum(1)
        torch.testing.assert_close(
            total, ops.moe(x, ids, weights, address, layout), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("size", [(2, 16, 16), (4, 128, 128), (3, 25, 40)], ids=str)
@pytest.mark.parametrize("begins", [True, False], ids=["begins", "goes on"])
def test_delta_scan_matches_reference_and_chunks_change_no_bit(ops, size, begins):
    heads, keys, values = size
    q, k = (torch.randn(9, heads, keys) * keys**-0.5 for _ in range(2))
    v = torch.randn(9, heads, values)
    decay, beta = torch.rand(9, heads), torch.rand(9, heads)
    state = None if begins else torch.randn(heads, keys, values)
    mine, theirs = (torch.full((heads, keys, values), float("nan")) for _ in range(2))
    out = ops.delta_scan(q, k, v, decay, beta, state, mine)
    expected = delta_scan(q, k, v, decay, beta, state, theirs)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    source, parts = state, []
    piece = torch.full_like(mine, float("nan"))
    for part in (slice(0, 1), slice(1, 6), slice(6, 9)):
        parts.append(
            ops.delta_scan(q[part], k[part], v[part], decay[part], beta[part], source, piece)
        )
        source = piece
    assert torch.equal(torch.cat(parts), out) and torch.equal(piece, mine)


def test_moe_refuses_an_expert_that_does_not_exist(ops):
    _records, address, layout = experts(torch.float32, 64, 48, 3)
    ids = torch.tensor([[3]], dtype=torch.int32)
    with pytest.raises(AssertionError):
        ops.moe(torch.randn(1, 64), ids, torch.ones(1, 1), address, layout)


# ---- attention

ATTENTION_CASES = [  # heads, kv heads, head dim, page tokens, window
    (8, 2, 64, 16, None),
    (4, 4, 80, 8, None),
    (3, 1, 16, 64, 5),
    (16, 2, 128, 16, 300),
    (5, 5, 40, 7, None),
]


@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("N", "NKV", "D", "page_tokens", "window"), ATTENTION_CASES, ids=str)
def test_attention_matches_reference(ops, N, NKV, D, page_tokens, window, sinks, act):
    kv = Paged((700, 3, 257), NKV, D, page_tokens, act)
    rows = [(0, p) for p in (0, 1, 255, 256, *range(690, 700))] + [(1, p) for p in range(3)]
    rows += [(2, 256)]
    sequence, position = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    q = torch.randn(len(rows), N, D).to(act)
    logits = 2 * torch.randn(N) if sinks else None
    args = (q, kv.k, kv.v, kv.table, sequence, position, D**-0.5, window, logits)
    torch.testing.assert_close(ops.attention(*args), REFERENCE.attention(*args), **TOLERANCE[act])


@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize(("N", "NKV", "D", "page_tokens", "window"), ATTENTION_CASES, ids=str)
def test_attention_does_not_depend_on_batch_chunks_or_pages(
    ops, N, NKV, D, page_tokens, window, act
):
    kv = Paged((600, 40), NKV, D, page_tokens, act)
    order = torch.randperm(kv.k.shape[0])  # the same keys on other pages
    moved_k, moved_v = torch.empty_like(kv.k), torch.empty_like(kv.v)
    moved_k[order], moved_v[order] = kv.k, kv.v
    moved_table = order[kv.table.long()].to(torch.int32)
    rows = [(0, p) for p in range(560, 600)] + [(1, p) for p in range(40)]
    sequence, position = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    q = torch.randn(len(rows), N, D).to(act)
    sinks = torch.randn(N)
    together = ops.attention(q, kv.k, kv.v, kv.table, sequence, position, D**-0.5, window, sinks)
    for T in (1, 3, 8, 11, 64):
        for first in (0, 37, len(rows) - T):
            part = slice(first, first + T)
            alone = ops.attention(
                q[part],
                moved_k,
                moved_v,
                moved_table,
                sequence[part],
                position[part],
                D**-0.5,
                window,
                sinks,
            )
            assert torch.equal(alone, together[part]), (T, first)


def test_attention_spreads_a_long_context_with_the_same_result(ops):
    kv = Paged((4000,), 2, 64, 16, torch.float32)
    many = torch.arange(
        3900, 4000, dtype=torch.int32
    )  # enough rows: one unit does all their blocks
    zeros = torch.zeros_like(many)
    q = torch.randn(100, 4, 64)
    sinks = torch.randn(4)
    together = ops.attention(q, kv.k, kv.v, kv.table, zeros, many, 0.125, None, sinks)
    for row in (0, 50, 99):
        at = slice(row, row + 1)
        one = q[at], kv.k, kv.v, kv.table, zeros[at], many[at]
        alone = ops.attention(*one, 0.125, None, sinks)
        assert torch.equal(alone, together[at])


def test_attention_hands_on_nan_in_a_key(ops):
    kv = Paged((20,), 1, 16, 8, torch.float32)
    kv.k[kv.table[0, 1], 2] = float("nan")  # position 10
    position = torch.arange(20, dtype=torch.int32)
    q = torch.randn(20, 2, 16)
    y = ops.attention(q, kv.k, kv.v, kv.table, torch.zeros_like(position), position, 0.25)
    assert y[:10].isfinite().all() and y[10:].isnan().all()


def test_attention_refuses_a_position_past_the_page_table(ops):
    kv = Paged((20,), 1, 16, 8, torch.float32)
    where = torch.tensor([24], dtype=torch.int32)
    with pytest.raises(AssertionError):
        ops.attention(torch.randn(1, 2, 16), kv.k, kv.v, kv.table, where * 0, where, 0.25)


# ---- rows


@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 700])
def test_write_kv_matches_reference(ops, act, rows):
    k, v = torch.randn(2, rows, 3, 20).to(act)
    pages = [torch.zeros(64, 16, 3, 20, dtype=act) for _ in range(4)]
    place = torch.randperm(1024)[:rows]
    ops.write_kv(k.contiguous(), v.contiguous(), place, pages[0], pages[1])
    REFERENCE.write_kv(k, v, place, pages[2], pages[3])
    assert torch.equal(pages[0], pages[2]) and torch.equal(pages[1], pages[3])


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("x_dtype", WEIGHTS, ids=str)
@pytest.mark.parametrize("shape", [(1, 96), (3, 5, 128), (2, 17), (130, 2880)], ids=str)
def test_rms_norm_matches_reference(ops, shape, x_dtype, out):
    x, weight = torch.randn(shape).to(x_dtype), torch.randn(shape[-1]).to(torch.bfloat16)
    want = REFERENCE.rms_norm(x, weight, 1e-6, out)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6, out), want, **TOLERANCE[out])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [32, 12, 20, 5])
@pytest.mark.parametrize("act", ACTS, ids=str)
def test_rope_matches_reference(ops, act, half, interleaved):
    x = torch.randn(9, 5, 64).to(act)
    angle = torch.rand(9, half) * 6.3
    args = (angle.cos(), angle.sin(), interleaved)
    want = REFERENCE.rope(x.clone(), *args)
    torch.testing.assert_close(ops.rope(x, *args), want, **TOLERANCE[act])


@pytest.mark.parametrize("act", [*ACTS, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 17), (5, 96), (300, 200)], ids=str)
def test_silu_mul_matches_reference(ops, shape, act):
    both = torch.cat((torch.randn(shape) * 8, torch.randn(shape)), dim=1).to(act)
    gate, up = both.chunk(2, dim=1)
    want = REFERENCE.silu_mul(gate, up)
    torch.testing.assert_close(ops.silu_mul(gate, up), want, **TOLERANCE[act])


def test_silu_mul_at_the_ends_of_the_number_line(ops):
    gate = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30, float("nan")])
    want = REFERENCE.silu_mul(gate, torch.ones(9))
    torch.testing.assert_close(
        ops.silu_mul(gate, torch.ones(9)), want, rtol=1e-5, atol=1e-30, equal_nan=True
    )


@pytest.mark.parametrize("act", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_torchs_for_every_kind_of_number(ops, act):
    bits = torch.arange(0, 2**32, 65521, dtype=torch.int64).to(torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.tensor([65519.9, 65520.0, 2**-25, 1e-40])])
    one = torch.ones(1, 1)
    y = ops.linear(one, x[:, None].contiguous(), out_dtype=act)[0]
    same = y.view(torch.int16) == x.to(act).view(torch.int16)
    assert (same | (x.isnan() & y.isnan())).all()


# ---- threads, instruction sets


@pytest.mark.parametrize("isa", ISAS)
def test_results_do_not_depend_on_the_number_of_threads(isa):
    records, address, layout = experts(torch.bfloat16, 328, 200, 6)
    x, w = torch.randn(9, 328), torch.randn(999, 328).to(torch.bfloat16)
    ids, weights = routes(9, 3, 6)
    kv = Paged((900,), 2, 64, 16, torch.float32)
    position = torch.arange(891, 900, dtype=torch.int32)
    q = torch.randn(9, 4, 64)
    results = []
    for threads in (1, 2, 5):
        ops = native.load(isa, threads)
        results.append(
            (
                ops.linear(x, w),
                ops.moe(x, ids, weights, address, layout),
                ops.attention(q, kv.k, kv.v, kv.table, position * 0, position, 0.125),
            )
        )
        ops.close()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    del records


def test_unknown_instruction_set_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match="--cpu-isa sse9: no such instruction set") as error:
        native.load("sse9")
    assert "portable" in error.value.hint


def test_auto_takes_the_best_instruction_set():
    ops = native.load(threads=1)
    assert ops.name == ISAS[-1]
    ops.close()


def test_calibration_sets_a_distance_and_reports_rates():
    records, address, layout = experts(torch.bfloat16, 64, 48, 4)
    ops = native.load(threads=2)
    found = calibrate(ops, layout, address, torch.bfloat16, 2, seconds=0.02)
    assert set(found.prefetch_bytes) <= set(PREFETCH_CHOICES_BYTES)
    assert min(*found.expert_bytes_per_s, found.read_bytes_per_s) > 0
    ops.close()
    del records


def test_missing_library_is_a_reason_and_no_error(tmp_path):
    assert native.load(library=tmp_path / "absent.so") is None
    assert "absent.so" in native.unavailable_reason(tmp_path / "absent.so")
