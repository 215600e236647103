"""Compiles every kernel at the shapes that serve, for GPUs that are not here. Run by test_compile.

The launchers run on tensors without memory; what they would launch is compiled instead. Prints a
line for each kernel and target: shared memory, and how many loads are as wide or narrow as can be.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ftd.kernels.activation import GPT_OSS, SILU
from ftd.kernels.cpu.service import Mailbox
from ftd.kernels.delta import DeltaWeights, LayerStates, StateRows, StateSpan
from ftd.kernels.divide import new_shared
from ftd.kernels.formats import (
    FORMATS,
    PackedMatrix,
    expert_layout,
    matrix_layout,
    scaled_formats,
)
from ftd.kernels.sample import ALL_SHAPES, Drawn, Kept, Rows, mask_words
from ftd.kernels.triton import divide, launch, sample
from ftd.kernels.triton.ops import CudaOps
from ftd.kernels.triton.places import places
from ftd.kernels.triton.pull import pull
from ftd.kernels.triton.sum_norm import RouteProducts

POINTER = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1", torch.float64: "*fp64",
    torch.uint8: "*u8", torch.int8: "*i8",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")

launched: dict[Any, tuple[JITFunction, dict[str, Any], dict[str, Any]]] = {}


def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
    values = dict(zip(self.arg_names, args)) | kwargs
    signature, constants, attrs = {}, {}, {}
    for i, parameter in enumerate(self.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTER[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if value < 1 << 31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(self, signature, constants, attrs)
    key = (self.__name__, tuple(signature.items()), tuple(sorted(map(str, constants.items()))))
    launched[key] = (self, {"source": source}, options)


JITFunction.run = record


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_everything() -> None:
    """The shapes of Qwen3-30B-A3B; float32 activations once."""
    ops = CudaOps()
    layout = expert_layout(FORMATS["bf16"], 2048, 768)
    N, NKV, D, page, P, M = 32, 4, 128, 16, 512, 256
    i32, i64, f32, bf16 = torch.int32, torch.int64, torch.float32, torch.bfloat16
    address = tensor(128, dtype=i64)
    for act, rows in ((bf16, (1, 8)), (f32, (1,))):
        for T in rows:
            for outputs, K, out in ((5120, 2048, act), (2048, 4096, f32), (128, 2048, f32)):
                ops.linear(tensor(T, K, dtype=act), tensor(outputs, K), None, out)
            ops.linear(tensor(T, 2048, dtype=act), tensor(151936, 2048), None, f32)
            routes = tensor(T, 8, dtype=i32), tensor(T, 8, dtype=f32)
            x = tensor(T, 2048, dtype=act)
            ops.moe(x, *routes, address, layout)
            ops.moe(x, *routes, address, layout, fill=address)
            shared = address, tensor(2, dtype=i32)  # with the CPU
            ops.route_products(x, routes[0], address, layout, SILU, *shared)
    k = tensor(P, page, NKV, D)
    for T in (1, 4, 16, 512, 2048):
        x, table, at = tensor(T, 2048), tensor(8, M, dtype=i32), tensor(T, dtype=i32)
        routes = tensor(T, 8, dtype=i32), tensor(T, 8, dtype=f32)
        if T > 8:
            ops.moe(x, *routes, address, layout)
        for window in (None, 1024) if T in (1, 512) else (None,):
            ops.attention(tensor(T, N, D), k, k, table, at, at, 0.1, window)
            if window:  # as in gpt-oss
                sinks = tensor(N, dtype=f32)
                ops.attention(tensor(T, N, D), k, k, table, at, at, 0.1, window, sinks)
    k32 = tensor(P, page, NKV, D, dtype=f32)
    for T in (1, 64):
        table, at = tensor(8, M, dtype=i32), tensor(T, dtype=i32)
        ops.attention(tensor(T, N, D, dtype=f32), k32, k32, table, at, at, 0.1)
    x = tensor(64, 2048, dtype=f32)
    ops.moe(x, tensor(64, 8, dtype=i32), tensor(64, 8, dtype=f32), address, layout)
    for H in (2048, 4096):
        stream, weight = tensor(4, H, dtype=f32), tensor(H, dtype=f32)
        ops.rms_norm(stream, weight, 1e-6, bf16)
        ops.add_rms_norm(stream, stream, weight, 1e-6, bf16)
    turn = tensor(4, 64, dtype=f32), tensor(4, 64, dtype=f32)
    norm = tensor(D, dtype=f32)
    place = tensor(4, dtype=i64)
    for interleaved in (False, True):
        ops.rope(tensor(4, N, D), *turn, interleaved)
        ops.split_heads(
            tensor(4, N + 2 * NKV, D), N, (norm, norm), 1e-6, turn, interleaved, place, k, k
        )
    ops.write_kv(tensor(4, NKV, D), tensor(4, NKV, D), place, k, k)
    for T in (1, 4):
        ops.silu_mul(*tensor(T, 12288).chunk(2, dim=1))
    ops.route(tensor(4, 128, dtype=f32), 8, True)
    ops.route(tensor(4, 512, dtype=f32), 10, False)
    ops.route(tensor(1, 128, dtype=f32), 8, True, tensor(1, dtype=torch.bool))
    ops.turns(tensor(4, dtype=i32), tensor(64, dtype=f32), 1.25)
    places(tensor(4, dtype=i64), tensor(4, M, dtype=i32), 16, 0)
    pull(torch.zeros(4, M, dtype=i32), tensor(4, M, dtype=i32))  # from real memory: its address
    for V in (151936, 248320):
        rows, kept, out = Rows(4, "meta"), Kept(8, V, "meta"), Drawn.empty(4, "meta")
        logits, mask = tensor(4, V, dtype=f32), tensor(4, mask_words(V), dtype=i32)
        work, ids = sample.Work(8, V, "meta"), tensor(4, dtype=i64)
        for shapes in ALL_SHAPES:
            sample.sample(logits, rows, kept, mask, out, ids, work, shapes)
    both = tensor(4, 16, 2, 256)
    ops.sigmoid_mul(tensor(4, 16, 256), both[:, :, 1])
    ops.add_gated(tensor(4, 2048, dtype=f32), tensor(4, 2048, dtype=f32), tensor(4, 1, dtype=f32))
    launch_delta(ops)


def launch_scaled(names: list[str]) -> None:
    """Experts of Qwen3-30B-A3B and a dense matrix in some formats, and gpt-oss' experts."""
    ops, i32, i64, f32 = CudaOps(), torch.int32, torch.int64, torch.float32
    cases = [(expert_layout(FORMATS[name], 2048, 768), 8, SILU, (1, 2048)) for name in names]
    cases.append((expert_layout(FORMATS["mxfp4"], 2880, 2880, bias=True), 4, GPT_OSS, (8,)))
    address = tensor(128, dtype=i64)
    for layout, K, activation, sizes in cases:
        for T in sizes:
            routes = tensor(T, K, dtype=i32), tensor(T, K, dtype=f32)
            fill = address if T <= 8 else None
            x = tensor(T, layout.hidden)
            ops.moe(x, *routes, address, layout, activation, fill)
            if T == 1:
                shared = address, tensor(2, dtype=i32)  # with the CPU
                ops.route_products(x, routes[0], address, layout, activation, *shared)
    for name in names[:2]:
        packed, num_bytes = matrix_layout(FORMATS[name], 5120, 2048)
        weight = PackedMatrix(packed, tensor(num_bytes, dtype=torch.uint8))
        for T in (4, 64):
            ops.linear(tensor(T, 2048), weight, None, f32)


def launch_delta(ops: CudaOps) -> None:
    """The shapes of Qwen3.6-35B-A3B."""
    i64, f32, f64 = torch.int64, torch.float32, torch.float64
    NK, NV, D = 16, 32, 128
    C = (2 * NK + NV) * D
    head = tensor(NV, dtype=f64)
    weights = DeltaWeights(
        NK, NV, D, D, tensor(4, C, dtype=f32), head, head, tensor(D, dtype=f32), 1e-6
    )
    states = LayerStates(tensor(32, dtype=i64), 0, NV * D * D * 4)
    for act in (torch.bfloat16, f32):
        row = tensor(1, 2 * NV, dtype=f32)[:, :NV]
        slots = tensor(1, dtype=i64)
        both = tensor(1, C + NV * D, dtype=act)
        one = both[:, :C], both[:, C:], row, row
        ops.delta(*one, weights, states, StateRows(slots, slots))
        gates = tensor(80, NV, dtype=f32)
        some = tensor(80, C, dtype=act), tensor(80, NV * D, dtype=act), gates, gates
        ops.delta(*some, weights, states, (StateSpan(0, None, ((80, 1),)),))


def launch_division() -> None:
    i32, i64, f32 = torch.int32, torch.int64, torch.float32
    for T, K, E, act, asks in (
        (1, 8, 128, torch.bfloat16, True), (8, 10, 512, torch.bfloat16, True),
        (1, 8, 128, f32, True), (8, 8, 128, torch.bfloat16, False),
    ):  # fmt: skip
        box = Mailbox(8, K, 2048, act, pin=False) if asks else None
        layout = expert_layout(FORMATS["bf16"], 2048, 768)
        shared = new_shared(tensor(2, E, dtype=i64), 64, (1 << 40, 1 << 41), box, layout)
        ids, log, here = (tensor(T, K, dtype=i32) for _ in range(3))
        divide.divide(
            shared, 1, ids, tensor(T, dtype=torch.bool), tensor(T, 2048, dtype=act), log, here
        )
        y, weights = tensor(T * K, 2048, dtype=f32), tensor(T, K, dtype=f32)
        later = RouteProducts(y, log, here, weights, shared if asks else None)
        later.sum()
        later.add_rms_norm(tensor(T, 2048, dtype=f32), tensor(2048, dtype=f32), 1e-6, act)
        if T == 1:
            logits, active = tensor(1, E, dtype=f32), tensor(1, dtype=torch.bool)
            of_row = active, tensor(1, 2048, dtype=act), log, here
            divide.choose_and_divide(CudaOps(), shared, 1, logits, True, *of_row)


def stores_before_waiting(ptx: str) -> int:
    """Of a kernel that may start before an earlier one has ended."""
    before, waits, _ = ptx.partition("griddepcontrol.wait")
    assert waits and "griddepcontrol.launch_dependents" in before, "it does not wait"
    return len(re.findall(r"\bst\.global|\bred\.|\batom\.", before))


def main() -> None:
    capabilities = [int(word) for word in sys.argv[1:]]
    launch.can_chain = lambda device: min(capabilities) >= 90
    launch_everything()
    launch_division()
    oldest = "86" in sys.argv  # has the fewest conversions of all
    launch_scaled([f.name for f in scaled_formats()] if oldest else ["fp8", "nvfp4"])
    for capability in capabilities:
        for kernel, held, options in launched.values():
            target = GPUTarget("cuda", capability, 32)
            compiled = triton.compile(held["source"], target=target, options=options)
            ptx = compiled.asm["ptx"]
            wide = re.findall(r"ld\.global[.\w:]*\.v4\.b32|cp\.async\.cg", ptx)
            narrow = re.findall(r"ld\.global[.\w:]*\.b16", ptx)
            line = {
                "kernel": kernel.__name__,
                "target": capability,
                "shared_bytes": compiled.metadata.shared,
                "wide_loads": len(wide),
                "narrow_weight_loads": len(narrow),
                "chained": "launch_pdl" in options,
                "early_stores": stores_before_waiting(ptx) if "launch_pdl" in options else 0,
                "options": options,
                "constants": {k: str(v) for k, v in held["source"].constants.items()},
            }
            print(json.dumps({**line, "constants": str(list(line["constants"].values()))}))


if __name__ == "__main__":
    main()
