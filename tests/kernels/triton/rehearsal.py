"""Goes through a warm-up on the CPU's tensors as if a GPU were there. Run by test_precompile."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

sys.path.insert(0, str(Path(__file__).parents[2] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[2] / "cuda"))

from cuda_core import cuda_core

from ftd.cuda import precompile
from ftd.cuda.graphs import BATCHES
from ftd.engine import cuda_runner
from ftd.engine.cuda_runner import CudaRunner
from ftd.kernels.triton.ops import CudaOps

ORACLES = Path(__file__).parents[2] / "data" / "oracles"


NAMES: list[str] = []  # of kernels that would be compiled


class Driver:
    """A GPU of which only the kind is known: whoever launches something fails."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Counting:
    """An executor that compiles nothing."""

    def __init__(self, threads: int, **_: object) -> None:
        pass

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work) -> Future:
        source = next(c.cell_contents for c in work.__closure__ if hasattr(c.cell_contents, "fn"))
        NAMES.append(source.fn.__name__)
        done: Future = Future()
        done.set_result(None)
        return done


def compile_some() -> dict[str, object]:
    ops = CudaOps()
    x, weight = torch.ones(4, 64), torch.ones(64)
    with precompile.compiling(2):
        first = ops.rms_norm(x, weight, 1e-6, torch.float32)
        ops.rms_norm(x, weight, 1e-6, torch.float32)
        ops.silu_mul(x, x)
    unset = torch.empty(1 << 16).fill_(1)  # the modes are gone
    mark = precompile.mark_of("a model", 9)
    mark.touch()
    assert mark != precompile.mark_of("another model", 9) and mark == precompile.mark_of(
        "a model", 9
    )
    return {"zeros": not first.any().item(), "after": bool(unset.all())}


def rehearse(name: str) -> dict[str, object]:
    """Which kernels a rehearsal finds, and which a warm-up needs beside them."""
    precompile.ThreadPoolExecutor = Counting
    warm_up, found = CudaRunner.warm_up, []

    def rehearsed(runner, progress) -> None:
        runner.rehearse([(batch, divided) for batch in BATCHES for divided in (True, False)])
        found.extend(NAMES)
        NAMES.clear()
        warm_up(runner, progress)

    CudaRunner.warm_up = rehearsed
    with (
        precompile.compiling(2),
        cuda_core(ORACLES / name, slots=9, ops=CudaOps(), fetch_of=[0, 0, 1]) as core,
    ):
        assert not core.experts._num_tokens, "a step is left"
    return {"found": sorted(set(found)), "missing": sorted(set(NAMES))}


def start_on_gpu(name: str) -> dict[str, object]:
    """What a start with an empty cache compiles in its rehearsal, and what only afterwards."""
    compiled: dict[bool, list[str]] = {True: [], False: []}
    rehearsing = False

    @contextmanager
    def noticed(threads: int) -> Iterator[None]:
        nonlocal rehearsing
        with precompile.compiling(threads):
            rehearsing = True
            yield
        rehearsing = False

    def compile_ended(*, src, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            compiled[rehearsing].append(src.name)

    cuda_runner.compiling = noticed
    knobs.compilation.listener = compile_ended
    with cuda_core(ORACLES / name, slots=9, ops=CudaOps(), device="cuda:0", fetch_of=[0, 0, 1]):
        pass
    return {"found": len(compiled[True]), "missing": sorted(compiled[False])}


def main() -> None:
    *on, name = ["", *sys.argv[1:]]
    if "gpu" in on:
        print(json.dumps(start_on_gpu(name)))
        return
    driver.set_active(Driver())
    print(json.dumps(rehearse(name) if name else compile_some()))


if __name__ == "__main__":
    main()
