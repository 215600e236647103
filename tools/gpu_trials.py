"""What trials of GPU kernels share: random experts, comparing with torch, and timing by replays.

Every operation is run once directly and once as a replayed CUDA graph whose inputs have changed
since it was captured. ``failures`` collects what differed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ftd.kernels.formats import ExpertLayout
from ftd.kernels.reference import TorchOps
from ftd.kernels.triton.ops import CudaOps

BF16, F32 = torch.bfloat16, torch.float32
reference, ops = TorchOps(), CudaOps()
failures: list[str] = []


class Records:
    """Random experts, in GPU memory or in pinned host memory."""

    def __init__(
        self, layout: ExpertLayout, num: int, *, on_gpu: bool, scale: float = 0.02
    ) -> None:
        count = layout.record_bytes * num // layout.format.dtype.itemsize
        generator = torch.Generator("cuda").manual_seed(num)
        numbers = torch.empty(count, dtype=layout.format.dtype, device="cuda")
        numbers.normal_(0, scale, generator=generator)
        self.memory = numbers if on_gpu else numbers.cpu().pin_memory()
        self.bytes = self.memory.view(torch.uint8).view(num, -1)
        start = self.memory.data_ptr()
        self.address = torch.arange(num) * layout.record_bytes + start


def compare(name: str, mine: torch.Tensor, expected: torch.Tensor, act: torch.dtype) -> None:
    mine, expected = mine.detach().cpu().float(), expected.float()
    limit = 1e-4 if act == F32 else 1.5e-2
    error = float((mine - expected).abs().max()) if mine.numel() else 0.0
    scale = max(1e-6, float(expected.abs().max())) if mine.numel() else 1.0
    if not error <= limit * scale:  # NaN too
        failures.append(name)
        print(f"WRONG {name}: error {error:.3g} of {scale:.3g}", flush=True)


def run_both(
    name: str,
    act: torch.dtype,
    run: Callable[..., torch.Tensor],
    expect: Callable[..., torch.Tensor],
    draws: Sequence[tuple[torch.Tensor, ...]],  # inputs on the CPU, of equal shapes
) -> None:
    """Run directly on the first inputs, capture there, replay with each of them."""
    held = tuple(x.cuda() for x in draws[0])
    compare(name, run(*held), expect(*draws[0]), act)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(*held)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = run(*held)
    for draw in draws[::-1]:
        for to, given in zip(held, draw, strict=True):
            to.copy_(given)
        graph.replay()
        torch.cuda.synchronize()
        compare(f"{name}, replayed", out, expect(*draw), act)


def seconds(run: Callable[[int], object], rounds: int = 20) -> float:
    """Of one call, from a graph of ``rounds`` of them; the best of five replays."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(rounds):
            run(i)
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / rounds)
    return min(times[1:])


def row(what: str, s: float, num_bytes: float = 0, flops: float = 0) -> None:
    rate = f"{num_bytes / s / 1e9:8.0f} GB/s" if num_bytes else f"{flops / s / 1e12:8.1f} TFLOP/s"
    print(f"{what:58} {s * 1e6:9.1f} us {rate}", flush=True)


def routes(T: int, E: int, K: int, num: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(T)
    for _ in range(num):
        ids = torch.rand(T, E, generator=generator).topk(K).indices.int()
        yield ids.cuda(), torch.rand(T, K, generator=generator).cuda()
