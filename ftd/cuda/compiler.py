"""A process that compiles Triton kernels, for one that will find them in Triton's cache on disk.

Half of a compilation holds Python's lock: threads of one process mostly wait for each other. Here
one process imports Triton and the kernels, and forks as many as there are cores; it never imports
torch, which would take longer than compiling. Jobs come pickled through standard input, and it ends
when that does and all are done.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import IO, Any

from ftd.lazy import put_off
from ftd.units import MiB

PIPE_BYTES = MiB  # some hundred jobs: they need not wait for its imports


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel for one kind of arguments, as Triton's ``ASTSource`` and ``compile`` take it."""

    module: str
    kernel: str
    signature: Mapping[str, Any]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]
    target: Any  # triton.backends.compiler.GPUTarget
    launcher: bool  # whether the C stub is built that launches kernels of this signature


class Compiler:
    """The process, from the first job on."""

    def __init__(self, processes: int) -> None:
        self.jobs: list[Job] = []
        self._processes = processes
        self._process: subprocess.Popen[bytes] | None = None

    def submit(self, job: Job) -> None:
        """Have it compiled; what has gone wrong is told by nobody but the kernel's first launch."""
        self.jobs.append(job)
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            self._process.stdin.write(pickle.dumps(job))
            self._process.stdin.flush()

    def finish(self) -> int:
        """Wait for all; how many were compiled."""
        if self._process is None:
            return 0
        said, _ = self._process.communicate()
        return int(said or b"0")

    def _start(self) -> subprocess.Popen[bytes]:
        work = f"from ftd.cuda.compiler import main; main({self._processes})"
        return subprocess.Popen(
            [sys.executable, "-c", work],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pipesize=PIPE_BYTES,
        )


def main(processes: int) -> None:
    put_off("torch")
    from ftd.kernels.triton.keys import settle_keys

    settle_keys()  # before the fork: kernels are imported once for all
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context) as pool:
        done: list[Future[None]] = [pool.submit(compile_one, job) for job in read(sys.stdin.buffer)]
    sys.stdout.write(str(sum(job.exception() is None for job in done)))


def read(stream: IO[bytes]) -> Iterator[Job]:
    while True:
        try:
            job = pickle.load(stream)
        except EOFError:
            return
        yield job


def compile_one(job: Job) -> None:
    import triton
    from triton.compiler import ASTSource

    kernel = getattr(import_module(job.module), job.kernel)
    source = ASTSource(kernel, dict(job.signature), dict(job.constants), dict(job.attributes))
    compiled = triton.compile(source, target=job.target, options=dict(job.options))
    if job.launcher:
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(source, compiled.metadata)
