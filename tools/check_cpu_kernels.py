#!/usr/bin/env python3
"""Builds the CPU kernels with g++ alone and checks them on this machine, instruction set by set.

For machines where ftd is not installed: needs Python, torch, g++ and, for the tests, pytest.
Prints for every operation and instruction set the largest error against the torch reference
(relative to the largest number of the result) and the time it took, then runs the kernels' tests.

    python tools/check_cpu_kernels.py
    python tools/check_cpu_kernels.py --build /tmp/kernels --no-tests   # keeps the library
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "kernels/cpu"
FLAGS = ("-std=c++17", "-O3", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-fPIC")
LARGEST_ERROR = {"float32": 2e-5, "bfloat16": 2e-2}
sys.path[:0] = [str(ROOT), str(ROOT / "tests/kernels")]


def build(folder: Path) -> Path:
    """Compiles every source into folder; the library has the name under which ftd looks for it."""
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        subprocess.run(["g++", *FLAGS, "-c", str(source), "-o", str(target)], check=True)
        return str(target)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        objects = list(workers.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
    library = folder / "_cpu_kernels.so"
    subprocess.run(["g++", "-shared", "-pthread", *objects, "-o", str(library)], check=True)
    return library


def cases(act: torch.dtype) -> dict[str, Callable]:
    """Name → a call of one operation on the implementation it is given."""
    from packed_weights import random_matrix, random_records

    from ftd.kernels.formats import FORMATS

    torch.manual_seed(0)
    found: dict[str, Callable] = {}

    def linear(T: int, O: int, K: int, weight: torch.dtype) -> Callable:  # noqa: E741
        x, w = torch.randn(T, K).to(act), (torch.randn(O, K) / K**0.5).to(weight)
        return lambda ops: ops.linear(x, w, out_dtype=torch.float32)

    def moe(T: int, H: int, I: int, E: int, K: int, weight: str) -> Callable:  # noqa: E741
        layout, records, address = random_records(weight, H, I, E)
        x, weights = torch.randn(T, H).to(act), torch.rand(T, K)
        ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(torch.int32)
        return lambda ops, _keep=records: ops.moe(x, ids, weights, address, layout)

    def packed(T: int, O: int, K: int, name: str) -> Callable:  # noqa: E741
        x, (matrix, _) = torch.randn(T, K).to(act), random_matrix(name, O, K)
        return lambda ops: ops.linear(x, matrix, out_dtype=torch.float32)

    def attention(T: int, N: int, NKV: int, D: int, context: int, window: int | None) -> Callable:
        k, v = torch.randn(2, context // 16, 16, NKV, D).to(act)
        table = torch.randperm(context // 16).to(torch.int32)[None]
        position = torch.arange(context - T, context, dtype=torch.int32)
        q, sequence = torch.randn(T, N, D).to(act), torch.zeros(T, dtype=torch.int32)
        return lambda ops: ops.attention(q, k, v, table, sequence, position, D**-0.5, window)

    for weight in (torch.bfloat16, torch.float16, torch.float32):
        name = str(weight).removeprefix("torch.")
        for T, O, K in ((1, 2048, 2048), (1, 17, 2880), (7, 33, 200), (64, 512, 768)):  # noqa: E741
            found[f"linear {T}x{O}x{K} {name}"] = linear(T, O, K, weight)
    for T, H, I, E, K in ((1, 2048, 768, 8, 8), (5, 96, 224, 4, 2), (64, 256, 128, 4, 4)):  # noqa: E741
        for weight in FORMATS:
            found[f"moe {T}x{H}x{I} of {E} {weight}"] = moe(T, H, I, E, K, weight)
    for name in (row.name for row in FORMATS.values() if row.scaled):
        for T, O, K in ((1, 2048, 2048), (3, 17, 2880), (9, 260, 4320)):  # noqa: E741
            found[f"linear {T}x{O}x{K} {name}"] = packed(T, O, K, name)
    found["attention decode 4096"] = attention(1, 32, 4, 128, 4096, None)
    found["attention prefill 64"] = attention(64, 8, 2, 80, 512, None)
    found["attention window 100"] = attention(33, 6, 2, 64, 512, 100)
    x, weight = torch.randn(33, 2880).to(act), torch.rand(2880)
    found["rms_norm"] = lambda ops: ops.rms_norm(x, weight, 1e-6, torch.float32)
    found["silu_mul"] = lambda ops: ops.silu_mul(x * 4, x)
    heads, angle = torch.randn(33, 5, 80).to(act), torch.rand(33, 30)
    for interleaved in (False, True):
        found[f"rope {'pairs' if interleaved else 'halves'}"] = lambda ops, i=interleaved: ops.rope(
            heads.clone(), angle.cos(), angle.sin(), i
        )
    return found


def check(library: Path, threads: int | None) -> bool:
    from ftd.kernels.cpu import native
    from ftd.kernels.cpu.library import Library
    from ftd.kernels.reference import TorchOps

    isas = Library(library).isas()
    print("instruction sets:", ", ".join(f"{n}{'' if y else ' (no)'}" for n, y in isas.items()))
    here = [name for name, supported in isas.items() if supported]
    good = True
    for act in (torch.float32, torch.bfloat16):
        act_name = str(act).removeprefix("torch.")
        print(f"\n{act_name} activations: error | µs")
        print(f"{'':32}" + "".join(f"{isa:>20}" for isa in here))
        opened = [native.load(isa, threads, library=library) for isa in here]
        for name, call in cases(act).items():
            want = call(TorchOps()).float()
            row = ""
            for ops in opened:
                error = float((call(ops).float() - want).abs().max() / want.abs().max())
                took = min(timed(call, ops) for _ in range(5))
                wrong = not error < LARGEST_ERROR[act_name]
                good &= not wrong
                row += f"{'!' if wrong else ' '}{error:10.1e} |{took * 1e6:7.0f}"
            print(f"{name:32}{row}", flush=True)
        for ops in opened:
            ops.close()
    return good


def timed(call: Callable, ops: object) -> float:
    begin = time.perf_counter()
    call(ops)
    return time.perf_counter() - begin


def run_tests(library: Path) -> bool:
    import pytest

    import ftd

    ftd.__path__.insert(0, str(library.parent))  # where native looks for the library
    tests = sorted((ROOT / "tests/kernels").glob("test_cpu_*.py"))
    tests += sorted((ROOT / "tests/kernels").glob("test_native_*.py"))
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore"]
    return pytest.main([*options, "--rootdir", str(ROOT), *map(str, tests)]) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--build", type=Path, help="folder for the library; default: a passing one")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-tests", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as passing:
        begin = time.perf_counter()
        library = build(args.build or Path(passing))
        print(f"built in {time.perf_counter() - begin:.0f} s")
        good = check(library, args.threads)
        if not args.no_tests:
            good &= run_tests(library)
    print("all good" if good else "FAILED: see the lines with ! and the tests above")
    return not good


if __name__ == "__main__":
    raise SystemExit(main())
