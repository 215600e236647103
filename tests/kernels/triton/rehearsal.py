"""Goes through a warm-up on the CPU's tensors as if a GPU were there. Run by test_precompile."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

sys.path.insert(0, str(Path(__file__).parents[2] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[2] / "cuda"))

from cuda_core import cuda_core

from ftd.cuda import precompile
from ftd.cuda.compiler import Compiler, Job
from ftd.cuda.graphs import BATCHES
from ftd.engine.cuda_runner import CudaRunner
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.kernels.triton import divide
from ftd.kernels.triton.ops import CudaOps
from ftd.kernels.triton.sum_norm import RouteProducts

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
    """A compiler that compiles nothing."""

    def __init__(self, processes: int) -> None:
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(job)
        NAMES.append(job.kernel)

    def finish(self) -> int:
        return 0


def compile_some() -> dict[str, object]:
    ops = CudaOps()
    x, weight = torch.ones(4, 64), torch.ones(64)
    jobs: list[Job] = []
    submit = Compiler.submit

    def noticed(compiler: Compiler, job: Job) -> None:
        jobs.append(job)
        submit(compiler, job)

    Compiler.submit = noticed
    with precompile.compiling(2):
        first = ops.rms_norm(x, weight, 1e-6, torch.float32)
        ops.rms_norm(x, weight, 1e-6, torch.float32)
        ops.rms_norm(x[:3], weight, 1e-6, torch.float32)  # nor is this another kernel
        layout = expert_layout(FORMATS["bf16"], 64, 32)  # its kernels call others
        routes = torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
        ops.moe(x.bfloat16(), *routes, torch.zeros(8, dtype=torch.int64), layout)
    unset = torch.empty(1 << 16).fill_(1)  # the modes are gone
    mark = precompile.mark_of("a model", 9)
    mark.touch()
    assert mark != precompile.mark_of("another model", 9) and mark == precompile.mark_of(
        "a model", 9
    )
    return {
        "zeros": not first.any().item(),
        "after": bool(unset.all()),
        "found": [found_on_disk(job) for job in jobs],
        "stubs": [job.launcher for job in jobs],
    }


def found_on_disk(job: Job) -> bool:
    """Whether this process, which compiles in another order, would find the kernel."""
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    kernel = getattr(import_module(job.module), job.kernel)
    source = ASTSource(kernel, job.signature, job.constants, job.attributes)
    triton.compile(source, target=job.target, options=job.options)
    return hits == [True]


def rehearse(name: str) -> dict[str, object]:
    """Which kernels a rehearsal finds, and which a warm-up needs beside them."""
    precompile.Compiler = Counting
    warm_up, found = CudaRunner.warm_up, []

    def rehearsed(runner, progress) -> None:
        division = runner._experts.division
        division._kernels, division._later = divide, RouteProducts  # as on a GPU
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
    submit = Compiler.submit
    late: list[str] = []

    def noticed(compiler: Compiler, job: Job) -> None:
        NAMES.append(job.kernel)
        submit(compiler, job)

    def compile_ended(*, src, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            late.append(src.name)

    Compiler.submit = noticed
    knobs.compilation.listener = compile_ended
    with cuda_core(ORACLES / name, slots=9, ops=CudaOps(), device="cuda:0", fetch_of=[0, 0, 1]):
        pass
    return {"found": len(NAMES), "missing": sorted(late)}


def main() -> None:
    *on, name = ["", *sys.argv[1:]]
    if "gpu" in on:
        print(json.dumps(start_on_gpu(name)))
        return
    driver.set_active(Driver())
    print(json.dumps(rehearse(name) if name else compile_some()))


if __name__ == "__main__":
    main()
