"""The compiled library: where it is, its functions, and the structures they take, as in ftd_cpu.h.

Needs no torch: what it can do here is asked before anything is computed.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from ftd.errors import ConfigError

from ..activation import Activation
from ..formats import ExpertLayout, MatrixLayout

ABI = 6


class PoolPlan(Structure):
    _fields_ = (
        ("threads", c_int32),
        ("nodes", c_int32),
        ("node", POINTER(c_int32)),
        ("cpu_end", POINTER(c_int32)),
        ("cpus", POINTER(c_int32)),
        ("park_after_us", c_int32),
    )


class MatrixRecord(Structure):
    _fields_ = (
        ("format", c_int32),
        ("numbers", c_int64),
        ("scales", c_int64),
        ("factor", c_int64),
        ("bias", c_int64),
    )

    @staticmethod
    def of(layout: MatrixLayout) -> MatrixRecord:
        bias = -1 if layout.bias_offset is None else layout.bias_offset
        return MatrixRecord(
            layout.format.code, layout.offset, layout.scale_offset, layout.factor_offset, bias
        )


class LayoutRecord(Structure):
    _fields_ = (
        ("hidden", c_int32),
        ("inner", c_int32),
        ("gate", MatrixRecord),
        ("up", MatrixRecord),
        ("down", MatrixRecord),
    )

    @staticmethod
    def of(layout: ExpertLayout) -> LayoutRecord:
        matrices = (MatrixRecord.of(matrix) for matrix in layout.matrices.values())
        return LayoutRecord(layout.hidden, layout.inner, *matrices)


class ActivationRecord(Structure):
    _fields_ = (("limit", c_float), ("alpha", c_float), ("shift", c_float))

    @staticmethod
    def of(activation: Activation) -> ActivationRecord:
        return ActivationRecord(activation.limit, activation.alpha, activation.shift)


_P, _I, _N, _F = c_void_p, c_int32, c_int64, c_float
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ftd_abi": (_I, ()),
    "ftd_isa_name": (c_char_p, (_I,)),
    "ftd_isa_supported": (_I, (_I,)),
    "ftd_pool_create": (_P, (POINTER(PoolPlan),)),
    "ftd_pool_destroy": (None, (_P,)),
    "ftd_pool_wake": (None, (_P,)),
    "ftd_pool_finished": (_N, (_P,)),
    "ftd_pool_parked": (_I, (_P,)),
    "ftd_pool_place": (None, (_P, _N, _N, _I)),
    "ftd_ops_create": (_P, (_P, _I)),
    "ftd_ops_destroy": (None, (_P,)),
    "ftd_ops_prefetch": (None, (_P, _I, _I, _I)),
    "ftd_linear": (_I, (_P, _P, _I, _P, POINTER(MatrixRecord), _P, _I, _P, _I, _N, _N, _N)),
    "ftd_moe": (
        _I,
        (_P, _P, _I, _P, _P, _P, POINTER(LayoutRecord), POINTER(ActivationRecord), _P, _N, _N, _N),
    ),
    "ftd_service_start": (_P, (_P, _P)),
    "ftd_service_stop": (None, (_P,)),
    "ftd_service_expect": (None, (_P,)),
    "ftd_service_done": (None, (_P,)),
    "ftd_service_fault": (_I, (_P,)),
    "ftd_service_stick": (None, (_P,)),
    "ftd_attention": (
        _I,
        (_P, _P, _P, _P, _I, _P, _N, _P, _P, _P, _N, _N, _N, _N, _N, _F, _N, _P),
    ),
    "ftd_write_kv": (_I, (_P, _P, _P, _P, _P, _P, _N, _N, _N)),
    "ftd_rms_norm": (_I, (_P, _P, _I, _P, _I, _P, _I, _N, _N, _F)),
    "ftd_rope": (_I, (_P, _P, _I, _P, _P, _N, _N, _N, _N, _I)),
    "ftd_silu_mul": (_I, (_P, _P, _P, _P, _I, _N)),
    "ftd_delta_scan": (_I, (*(_P,) * 9, _N, _N, _N, _N)),
    "ftd_read": (_N, (_P, _P, _N, _N)),
}


class LibraryUnavailable(Exception):
    """Why the C++ kernels cannot be used here: no fault of anybody, torch computes instead."""


class Library:
    """The opened library: its functions and the instruction sets it has."""

    def __init__(self, path: Path | None = None) -> None:
        path = path or _installed_path()
        try:
            self.functions = ctypes.CDLL(str(path))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(self.functions, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise LibraryUnavailable(f"{path} cannot be opened: {error}") from error
        if (found := self.functions.ftd_abi()) != ABI:
            raise LibraryUnavailable(f"{path} has interface {found}, {ABI} is needed: reinstall")

    def isas(self) -> dict[str, bool]:
        """Instruction sets from worst to best, and whether this processor has each."""
        found: dict[str, bool] = {}
        while name := self.functions.ftd_isa_name(len(found)):
            found[name.decode()] = bool(self.functions.ftd_isa_supported(len(found)))
        return found

    def choose_isa(self, wanted: str = "auto") -> str:
        """The best one here, or the wanted one. Raises ConfigError for one that cannot run."""
        here = [name for name, supported in self.isas().items() if supported]
        if wanted == "auto":
            return here[-1]
        if wanted not in here:
            why = "this processor lacks it" if wanted in self.isas() else "no such instruction set"
            raise ConfigError(f"--cpu-isa {wanted}: {why}", hint=f"use auto, {', '.join(here)}")
        return wanted


def _installed_path() -> Path:
    spec = importlib.util.find_spec("ftd._cpu_kernels")
    if spec is None or spec.origin is None:
        raise LibraryUnavailable("not built: install g++ 11 or later, then install ftd again")
    return Path(spec.origin)


def unavailable_reason(library: Path | None = None) -> str | None:
    """Why ``load`` returns None; None where it does not."""
    try:
        Library(library)
    except LibraryUnavailable as reason:
        return str(reason)
    return None
