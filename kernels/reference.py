"""What every operation means, in plain torch; serves when the C++ kernels are not built.

Numerics: float32 inside, whatever the weights are stored in; a weight matrix is widened a slice at
a time, so no float32 copy of it ever exists. A row's result does not depend on the rows beside it
as far as torch allows, and it allows this much:

- BLAS picks its summation order by the shape of the product. Every product therefore runs in
  blocks of ``BLOCK_ROWS`` rows, the last one padded, so that its shape is always the same. This
  relies on BLAS treating all rows of one block alike, which the tests check for the BLAS at hand.
- Attention is computed row by row, because the number of keys is part of a product's shape.
- silu takes its exponential in float64: torch's float32 vector code and the scalar code that does
  the last elements of a tensor differ in the last bit, and who is last depends on the batch.

The order of a sum may change with the number of torch threads and the CPU; one process keeps both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from . import decode
from .activation import SILU, Activation
from .composed import ComposedOps
from .formats import ExpertLayout, Matrix, MatrixLayout, PackedMatrix

BLOCK_ROWS = 8  # rows of one matrix product: a compromise between decode (1) and prefill (many)
SLICE_BYTES = 1 << 20  # widened weights at a time: stays in a core's second-level cache


class TorchOps(ComposedOps):
    """``kernels.ops.Ops`` on the CPU; see there for shapes and rounding points."""

    name = "torch"

    def linear(
        self,
        x: torch.Tensor,  # [T, K] act
        weight: Matrix,  # [O, K]
        bias: torch.Tensor | None = None,  # [O]
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # [T, O]
        y = _matmul(x.float(), weight)
        if bias is not None:
            y += bias.float()
        return y.to(out_dtype or x.dtype)

    def moe(
        self,
        x: torch.Tensor,  # [T, H] act
        ids: torch.Tensor,  # [T, K] int32
        weights: torch.Tensor,  # [T, K] float32
        address: torch.Tensor,  # [E] int64
        layout: ExpertLayout,
        activation: Activation = SILU,
    ) -> torch.Tensor:  # [T, H] float32
        routes: dict[int, list[tuple[int, int]]] = {}  # expert → its (row, k)
        for row, chosen in enumerate(ids.tolist()):
            for k, expert in enumerate(chosen):
                if expert >= 0:
                    routes.setdefault(expert, []).append((row, k))
        y = torch.zeros(*ids.shape, layout.hidden)  # [T, K, H]: one output per route
        for expert, pairs in routes.items():
            rows, ks = torch.tensor(pairs).unbind(1)
            y[rows, ks] = expert_product(x[rows], int(address[expert]), layout, activation)
        out = torch.zeros(x.shape[0], layout.hidden)
        for k in range(ids.shape[1]):  # in the order of k: the sum is part of the contract
            out += weights[:, k, None] * y[:, k]
        return out

    def attention(
        self,
        q: torch.Tensor,  # [T, N, D] act
        k_pages: torch.Tensor,  # [P, page_tokens, NKV, D] act
        v_pages: torch.Tensor,
        page_table: torch.Tensor,  # [B, M] int32
        sequence: torch.Tensor,  # [T] int32
        position: torch.Tensor,  # [T] int32
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,  # [N] float32
    ) -> torch.Tensor:  # [T, N, D] act
        out = torch.empty_like(q)
        _, _, kv_heads, head_dim = k_pages.shape
        for row_sequence, rows in _rows_of_sequences(sequence):
            last = [int(p) for p in position[rows]]
            first = [max(0, p + 1 - window) if window else 0 for p in last]
            start, keys = _gather(k_pages, page_table[row_sequence], min(first), max(last))
            _, values = _gather(v_pages, page_table[row_sequence], min(first), max(last))
            for row, lo, hi in zip(rows, first, last, strict=True):
                seen = slice(lo - start, hi + 1 - start)
                grouped = q[row].float().view(kv_heads, -1, head_dim)  # [NKV, N / NKV, D]
                scores = grouped @ keys[:, seen].transpose(1, 2) * scale  # [NKV, N / NKV, S]
                if sinks is not None:
                    scores = torch.cat((scores, sinks.view(kv_heads, -1, 1)), -1)
                weights = scores.softmax(-1)[..., : hi + 1 - lo]
                attended = weights @ values[:, seen]  # [NKV, N / NKV, D]
                out[row] = attended.view(-1, head_dim).to(q.dtype)
        return out

    def write_kv(
        self,
        k: torch.Tensor,  # [T, NKV, D] act
        v: torch.Tensor,
        place: torch.Tensor,  # [T] int64
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
    ) -> None:
        k_pages.flatten(0, 1).index_copy_(0, place, k)
        v_pages.flatten(0, 1).index_copy_(0, place, v)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype
    ) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(out_dtype)

    def rope(
        self,
        x: torch.Tensor,  # [T, N, D] act
        cos: torch.Tensor,  # [T, R / 2] float32
        sin: torch.Tensor,
        interleaved: bool = False,
    ) -> torch.Tensor:
        half = cos.shape[-1]
        turning = x[..., : 2 * half]
        if interleaved:
            a, b = turning[..., 0::2], turning[..., 1::2]
        else:
            a, b = turning[..., :half], turning[..., half:]
        cos, sin = cos[:, None], sin[:, None]  # [T, 1, R / 2]
        a_turned, b_turned = a * cos - b * sin, b * cos + a * sin  # float32: cos and sin are
        a.copy_(a_turned)
        b.copy_(b_turned)
        return x

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(gate.double()).float() * up.float()).to(gate.dtype)


def record_at(address: int, layout: ExpertLayout) -> torch.Tensor:  # [record_bytes] uint8
    """The record there, as a view that does not keep it alive; the caller owns it."""
    memory = (ctypes.c_uint8 * layout.record_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def expert_matrices(
    address: int, layout: ExpertLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate [I, H], up [I, H] and down [H, I] of the record at ``address``.

    Unscaled ones are views, no copies, and do not keep the record alive.
    """
    record = record_at(address, layout)
    gate, up, down = (decode.decode_rows(m, record, 0, m.rows) for m in layout.matrices.values())
    return gate, up, down


def expert_product(
    x: torch.Tensor,  # [T, H] act
    address: int,
    layout: ExpertLayout,
    activation: Activation,
    begin: int = 0,
) -> torch.Tensor:  # [T, H] float32
    """down(activation(gate x, up x)), with h rounded to act and zero before ``begin``."""
    record = record_at(address, layout)

    def product(x: torch.Tensor, matrix: MatrixLayout) -> torch.Tensor:
        y = _matmul(x.float(), PackedMatrix(matrix, record))
        bias = decode.bias(matrix, record)
        return y if bias is None else y + bias

    h = activate(product(x, layout.gate), product(x, layout.up), activation)  # [T, I]
    h[:, :begin] = 0.0
    return product(h.to(x.dtype), layout.down)


def activate(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """h in float32, of float32; see ``Activation``."""
    limit, alpha = activation.limit, activation.alpha
    g = gate.clamp(max=limit)
    silu = torch.nn.functional.silu(g.double() * alpha) / alpha  # g · sigmoid(alpha · g)
    return silu.float() * (up.clamp(-limit, limit) + activation.shift)


def _matmul(
    x: torch.Tensor,  # [T, K] float32
    weight: Matrix,  # [O, K] any float
) -> torch.Tensor:  # [T, O] float32
    """x Wᵀ in blocks of fixed shape: see the head of this file."""
    (rows, columns), outputs = x.shape, weight.shape[0]
    blocks = torch.nn.functional.pad(x, (0, 0, 0, -rows % BLOCK_ROWS)).view(-1, BLOCK_ROWS, columns)
    out = torch.empty(len(blocks), BLOCK_ROWS, outputs)
    slice_rows = max(1, SLICE_BYTES // (4 * columns))
    for start in range(0, outputs, slice_rows):
        end = min(start + slice_rows, outputs)
        if isinstance(weight, PackedMatrix):
            part = decode.decode_rows(weight.layout, weight.data, start, end).float()
        else:
            part = weight[start:end].float()
        for block, result in zip(blocks, out, strict=True):
            result[:, start:end] = block @ part.T
    return out.view(-1, outputs)[:rows]


def _rows_of_sequences(sequence: torch.Tensor) -> Iterator[tuple[int, list[int]]]:
    """Each sequence of the step with its rows."""
    rows: dict[int, list[int]] = {}
    for row, owner in enumerate(sequence.tolist()):
        rows.setdefault(owner, []).append(row)
    yield from rows.items()


def _gather(
    pages: torch.Tensor,  # [P, page_tokens, NKV, D]
    table: torch.Tensor,  # [M] int32
    first: int,
    last: int,
) -> tuple[int, torch.Tensor]:
    """A sequence's rows from the page of ``first`` to ``last``: start, [NKV, S, D] float32."""
    page_tokens = pages.shape[1]
    used = table[first // page_tokens : last // page_tokens + 1].long()
    rows = pages[used].flatten(0, 1).float()  # [S, NKV, D]
    return first // page_tokens * page_tokens, rows.transpose(0, 1).contiguous()
