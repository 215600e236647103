"""The C++ kernels as an ``Ops``: ctypes over the plain C interface in ftd_cpu.h.

A call costs about two microseconds of Python and drops the GIL while it computes. The library is
optional: ``load`` returns None without it, and ``unavailable_reason`` says why.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, byref
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from ..activation import SILU, Activation
from ..composed import ComposedOps
from ..formats import FORMATS, ExpertLayout, Matrix, PackedMatrix
from .library import ActivationRecord, LayoutRecord, Library, MatrixRecord, unavailable_reason
from .pool import PARK_AFTER_US, CpuPool

_CODE = {row.dtype: row.code for row in FORMATS.values() if not row.scaled}
_PLAIN = {dtype: MatrixRecord(code, 0, 0, 0, -1) for dtype, code in _CODE.items()}

T = TypeVar("T")


def load(
    isa: str = "auto",
    threads: int | None = None,
    *,
    pin: bool = False,
    park_after_us: int = PARK_AFTER_US,
    library: Path | None = None,
) -> NativeOps | None:
    """The C++ kernels with a pool of their own, or None: then ``unavailable_reason`` says why.

    Args:
        isa: the value of --cpu-isa: an instruction set, or auto for the best one here.
        threads: the caller included; None: what suits the machine.
        pin: keep each worker on one processor.
        park_after_us: see ``CpuPool``.
        library: another file than the installed one.
    Raises:
        ConfigError: ``isa`` is unknown or this processor lacks it.
    """
    if unavailable_reason(library):
        return None
    opened = Library(library)
    name = opened.choose_isa(isa)
    return NativeOps(CpuPool(opened, threads, pin=pin, park_after_us=park_after_us), name)


class NativeOps(ComposedOps):
    """``kernels.ops.Ops`` by the C++ kernels of one instruction set."""

    def __init__(self, pool: CpuPool, isa: str) -> None:
        self.name = isa
        self.pool = pool
        self._c = pool.library.functions
        index = list(pool.library.isas()).index(isa)
        self._ops = self._c.ftd_ops_create(pool.handle, index)
        assert self._ops, isa
        # what the library is told of objects, by id: hashing a layout would cost as much as a call
        self._told: dict[int, tuple[object, Structure]] = {}
        self.prefetch_bytes: tuple[int, int] | None = None  # as set last; None: as built in

    @property
    def handle(self) -> int:
        """For the other functions of the library."""
        assert self._ops
        return self._ops

    def close(self) -> None:
        """End the pool's threads; the last call."""
        ops, self._ops = self._ops, None
        if ops:
            self._c.ftd_ops_destroy(ops)
            self.pool.close()

    def linear(
        self,
        x: torch.Tensor,
        weight: Matrix,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        T, K = x.shape
        O, inputs = weight.shape  # noqa: E741
        assert inputs == K, (x.shape, weight.shape)
        if isinstance(weight, PackedMatrix):
            matrix, record = self._tell(weight.layout, MatrixRecord.of), weight.data
        else:
            matrix, record = _PLAIN[weight.dtype], weight
        assert x.is_contiguous() and record.is_contiguous(), (x.stride(), record.stride())
        y = torch.empty(T, O, dtype=out_dtype or x.dtype)
        bias_pointer, bias_code = None, 0
        if bias is not None:
            assert bias.shape == (O,) and bias.is_contiguous(), (bias.shape, O)
            bias_pointer, bias_code = bias.data_ptr(), _CODE[bias.dtype]
        fault = self._c.ftd_linear(
            self._ops,
            x.data_ptr(),
            _CODE[x.dtype],
            record.data_ptr(),
            byref(matrix),
            bias_pointer,
            bias_code,
            y.data_ptr(),
            _CODE[y.dtype],
            T,
            O,
            K,
        )
        assert fault == 0, (fault, x.shape, weight.shape)
        return y

    def moe(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        address: torch.Tensor,
        layout: ExpertLayout,
        activation: Activation = SILU,
    ) -> torch.Tensor:
        y = torch.empty(x.shape, dtype=torch.float32)
        self.moe_call(x, ids, weights, address, layout, activation, y)()
        return y

    def moe_call(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        address: torch.Tensor,
        layout: ExpertLayout,
        activation: Activation,
        y: torch.Tensor,  # [T, H] float32
    ) -> Callable[[], None]:
        """``moe``, checked and ready: what is left to do takes no time in Python."""
        assert weights.dtype == torch.float32 and weights.is_contiguous(), weights.dtype
        assert weights.shape == ids.shape, (weights.shape, ids.shape)
        assert y.shape == x.shape and y.dtype == torch.float32, (y.shape, y.dtype)
        return self._moe(x, ids, weights.data_ptr(), address, layout, activation, y)

    def route_products(
        self,
        x: torch.Tensor,  # [T, H] act
        ids: torch.Tensor,  # [T, K] int32, -1: not in use
        address: torch.Tensor,  # [E] int64
        layout: ExpertLayout,
        activation: Activation,
        y: torch.Tensor,  # [T * K, H] float32, written where a route is in use
    ) -> None:
        """``moe`` before the sum: what each route adds, without its weight."""
        assert y.shape == (ids.numel(), x.shape[1]) and y.dtype == torch.float32, y.shape
        assert y.is_contiguous(), y.stride()
        self._moe(x, ids, None, address, layout, activation, y)()

    def _moe(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: int | None,
        address: torch.Tensor,
        layout: ExpertLayout,
        activation: Activation,
        y: torch.Tensor,
    ) -> Callable[[], None]:
        (T, H), (rows, K) = x.shape, ids.shape
        assert layout.hidden == H and rows == T, (x.shape, ids.shape)
        assert (ids.dtype, address.dtype) == (torch.int32, torch.int64), (ids.dtype, address.dtype)
        assert all(t.is_contiguous() for t in (x, ids, address)), (x.stride(), ids.stride())
        run = partial(
            self._c.ftd_moe,
            self._ops,
            x.data_ptr(),
            _CODE[x.dtype],
            ids.data_ptr(),
            weights,
            address.data_ptr(),
            byref(self._tell(layout, LayoutRecord.of)),
            byref(self._tell(activation, ActivationRecord.of)),
            y.data_ptr(),
            T,
            K,
            address.numel(),
        )

        def call(*, alive: tuple[object, ...] = (x, ids, address, y)) -> None:
            fault = run()
            assert fault == 0, (fault, x.shape, ids)

        return call

    def _tell(self, thing: T, describe: Callable[[T], Structure]) -> Structure:
        known = self._told.get(id(thing))
        if known is None:
            known = self._told[id(thing)] = thing, describe(thing)  # kept alive: the id is its own
        return known[1]

    def attention(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        page_table: torch.Tensor,
        sequence: torch.Tensor,
        position: torch.Tensor,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        T, N, D = q.shape
        _, page_tokens, kv_heads, head_dim = k_pages.shape
        assert head_dim == D and k_pages.shape == v_pages.shape, (q.shape, k_pages.shape)
        assert q.dtype == k_pages.dtype == v_pages.dtype, (q.dtype, k_pages.dtype, v_pages.dtype)
        assert page_table.dtype == sequence.dtype == position.dtype == torch.int32
        assert all(t.is_contiguous() for t in (q, k_pages, v_pages, page_table, sequence, position))
        if sinks is not None:
            assert sinks.shape == (N,) and sinks.is_contiguous(), sinks.shape
            assert sinks.dtype == torch.float32, sinks.dtype
        out = torch.empty(T, N, D, dtype=q.dtype)
        fault = self._c.ftd_attention(
            self._ops,
            q.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            _CODE[q.dtype],
            page_table.data_ptr(),
            page_table.shape[1],
            sequence.data_ptr(),
            position.data_ptr(),
            out.data_ptr(),
            T,
            N,
            kv_heads,
            D,
            page_tokens,
            scale,
            window or 0,
            None if sinks is None else sinks.data_ptr(),
        )
        assert fault == 0, (fault, q.shape, k_pages.shape, page_table.shape, position)
        return out

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        place: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
    ) -> None:
        T, kv_heads, D = k.shape
        assert k.shape == v.shape and k_pages.shape[2:] == (kv_heads, D), (k.shape, k_pages.shape)
        assert k.dtype == v.dtype == k_pages.dtype == v_pages.dtype, (k.dtype, k_pages.dtype)
        assert place.dtype == torch.int64 and place.shape == (T,), (place.dtype, place.shape)
        assert all(t.is_contiguous() for t in (k, v, place, k_pages, v_pages))
        fault = self._c.ftd_write_kv(
            self._ops,
            k.data_ptr(),
            v.data_ptr(),
            place.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            T,
            k_pages.shape[0] * k_pages.shape[1],
            kv_heads * D * k.element_size(),
        )
        assert fault == 0, (fault, place)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype
    ) -> torch.Tensor:
        H = x.shape[-1]
        assert weight.shape == (H,) and x.is_contiguous() and weight.is_contiguous(), x.shape
        y = torch.empty(x.shape, dtype=out_dtype)
        fault = self._c.ftd_rms_norm(
            self._ops,
            x.data_ptr(),
            _CODE[x.dtype],
            weight.data_ptr(),
            _CODE[weight.dtype],
            y.data_ptr(),
            _CODE[out_dtype],
            x.numel() // H,
            H,
            eps,
        )
        assert fault == 0, (fault, x.shape)
        return y

    def rope(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
    ) -> torch.Tensor:
        T, N, D = x.shape
        assert cos.shape == sin.shape and cos.shape[0] == T, (x.shape, cos.shape, sin.shape)
        assert cos.dtype == sin.dtype == torch.float32, (cos.dtype, sin.dtype)
        assert x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous(), x.stride()
        fault = self._c.ftd_rope(
            self._ops,
            x.data_ptr(),
            _CODE[x.dtype],
            cos.data_ptr(),
            sin.data_ptr(),
            T,
            N,
            D,
            cos.shape[1],
            interleaved,
        )
        assert fault == 0, (fault, x.shape, cos.shape)
        return x

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        assert gate.shape == up.shape and gate.dtype == up.dtype, (gate.shape, up.shape)
        gate, up = gate.contiguous(), up.contiguous()  # copies of several rows' halves
        y = torch.empty_like(gate)
        fault = self._c.ftd_silu_mul(
            self._ops,
            gate.data_ptr(),
            up.data_ptr(),
            y.data_ptr(),
            _CODE[gate.dtype],
            gate.numel(),
        )
        assert fault == 0, (fault, gate.shape)
        return y

    def delta_scan(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        source: torch.Tensor | None,
        target: torch.Tensor,
    ) -> torch.Tensor:
        """As ``kernels.delta.delta_scan``."""
        (T, NV, DK), DV = k.shape, v.shape[2]
        given = [t for t in (q, k, v, decay, beta, source, target) if t is not None]
        assert all(t.is_contiguous() and t.dtype == torch.float32 for t in given)
        assert target.shape == (NV, DK, DV) and decay.shape == beta.shape == (T, NV), target.shape
        out = torch.empty_like(v)
        fault = self._c.ftd_delta_scan(
            self._ops,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            decay.data_ptr(),
            beta.data_ptr(),
            None if source is None else source.data_ptr(),
            target.data_ptr(),
            out.data_ptr(),
            T,
            NV,
            DK,
            DV,
        )
        assert fault == 0, (fault, q.shape, v.shape)
        return out

    def read(self, address: torch.Tensor, num_bytes: int) -> int:
        """Read so many bytes at each address as plainly as the machine can; a checksum of them."""
        assert address.dtype == torch.int64 and address.is_contiguous(), address.dtype
        return self._c.ftd_read(self._ops, address.data_ptr(), address.numel(), num_bytes)

    def set_prefetch(self, layout: ExpertLayout, one_bytes: int, several_bytes: int) -> None:
        """How far ahead weights of this format are asked for, with one token and with several."""
        self.prefetch_bytes = one_bytes, several_bytes
        for several, distance in enumerate((one_bytes, several_bytes)):
            for code in {matrix.format.code for matrix in layout.matrices.values()}:
                self._c.ftd_ops_prefetch(self._ops, code, several, distance)
