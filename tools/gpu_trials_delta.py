"""Trials of the gated delta rule on a GPU; ``check_gpu_kernels`` runs them."""

# ruff: noqa: B023 - every function defined in a loop runs before the loop goes on

from __future__ import annotations

from dataclasses import replace

import torch
from gpu_trials import BF16, F32, compare, failures, ops, reference, row, run_both, seconds

from ftd.kernels.delta import DeltaWeights, LayerStates, StateRows, States, StateSpan
from ftd.kernels.ops import Ops


class DeltaLayer:
    """A gated delta net of Qwen3.6's size, the same states for the reference and for the kernels.

    The kernels' odd slots lie in pinned host memory.
    """

    NK, NV, D, SLOTS = 16, 32, 128, 20

    def __init__(self, act: torch.dtype) -> None:
        self.act, self.channels = act, (2 * self.NK + self.NV) * self.D
        self.tail = self.NV * self.D * self.D * 4
        on_cpu = DeltaWeights(
            self.NK, self.NV, self.D, self.D,
            conv=torch.randn(4, self.channels) * 0.5,
            rate=-torch.rand(self.NV).double(),
            bias=torch.randn(self.NV).double(),
            norm=torch.randn(self.D),
            norm_eps=1e-6,
        )  # fmt: skip
        on_gpu = replace(
            on_cpu,
            **{name: getattr(on_cpu, name).cuda() for name in ("conv", "rate", "bias", "norm")},
        )
        size = self.tail + 3 * self.channels * act.itemsize
        self.slots = torch.empty(self.SLOTS, size, dtype=torch.uint8)
        self.slots[:, : self.tail].view(torch.float32).normal_()
        self.slots[:, self.tail :].view(act).normal_()
        self.on_gpu, self.pinned = self.slots.cuda(), self.slots.clone().pin_memory()
        steps = size * torch.arange(self.SLOTS)
        odd = torch.arange(self.SLOTS) % 2 == 1
        mixed = torch.where(odd, self.pinned.data_ptr(), self.on_gpu.data_ptr()) + steps
        self.reference = on_cpu, LayerStates(self.slots.data_ptr() + steps, 0, self.tail)
        self.mine = on_gpu, LayerStates(mixed.cuda(), 0, self.tail)

    def draw(self, T: int) -> tuple[torch.Tensor, ...]:
        qkv, z = torch.randn(T, self.channels), torch.randn(T, self.NV * self.D)
        return qkv.to(self.act), z.to(self.act), torch.randn(T, self.NV), torch.randn(T, self.NV)

    def compare_states(self, name: str) -> None:
        mine = self.on_gpu.cpu()
        mine[1::2] = self.pinned[1::2]
        for slot in range(self.SLOTS):
            a, b = (states[slot, : self.tail].view(torch.float32) for states in (mine, self.slots))
            compare(f"{name}, state {slot}", a, b, self.act)
            if not torch.equal(mine[slot, self.tail :], self.slots[slot, self.tail :]):
                failures.append(f"{name}, tail {slot}")
                print(f"WRONG {name}: tail of slot {slot}", flush=True)


def check_delta() -> None:
    """Slots are written before they are read again, so a replay finds other states than before."""
    for act in (BF16, F32):
        layer = DeltaLayer(act)
        spans = (
            StateSpan(0, None, ((200, 8),)),
            StateSpan(200, 3, ((202, 9),)),
            StateSpan(202, 4, ((203, 10), (330, 11), (400, 12))),
        )
        inputs = layer.draw(400)
        weights, states = layer.mine
        mine = ops.delta(*(x.cuda() for x in inputs), weights, states, spans)
        compare(f"delta {act} chunks", mine, reference.delta(*inputs, *layer.reference, spans), act)
        torch.cuda.synchronize()
        layer.compare_states(f"delta {act} chunks")
        for B in (1, 2, 8):
            slots = torch.arange(B)

            def rows(one: Ops, *given: torch.Tensor) -> torch.Tensor:
                held = layer.reference if one is reference else layer.mine
                return one.delta(*given[:4], *held, StateRows(*given[4:]))

            draws = []
            for turn in range(2):
                source, target = slots + 10 * turn, slots + 10 - 10 * turn
                if B > 1:
                    source[0], target[1] = -1, -1
                draws.append((*layer.draw(B), source, target))
            run_both(
                f"delta {act} B={B}", act, lambda *a: rows(ops, *a), lambda *a: rows(reference, *a),
                draws,
            )  # fmt: skip


def bench_delta() -> None:
    layer = DeltaLayer(BF16)
    address = layer.on_gpu.data_ptr() + layer.on_gpu.stride(0) * torch.arange(layer.SLOTS)
    on_gpu = LayerStates(address.cuda(), 0, layer.tail)

    def bench(what: str, T: int, at: States, num_bytes: float = 0, flops: float = 0) -> None:
        inputs = [x.cuda() for x in layer.draw(T)]
        s = seconds(lambda i: ops.delta(*inputs, layer.mine[0], on_gpu, at), 8)
        row(f"delta {what}", s, num_bytes, flops)

    for B in (1, 4, 8):
        slots = torch.arange(B, device="cuda")
        bench(f"decode B={B}", B, StateRows(slots, slots + 10), num_bytes=2 * B * layer.tail)
    for T in (64, 512, 2048):
        flops = T * layer.NV * (6 * 128 * 128 + 6 * 64 * 128)
        bench(f"prefill {T}", T, (StateSpan(0, 0, ((T, 1),)),), flops=flops)
