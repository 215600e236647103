"""Builds the kernels of AVX512-BF16 and AMX for processors that have neither."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "kernels/cpu"
EMULATED = Path(__file__).resolve().parent / "emulated"
LEFT_OUT = ("isas.cpp", "isa_avx2.cpp", "isa_avx512.cpp")
FLAGS = ("-std=c++17", "-pthread", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-w")
TAKEN = ("-mavx2", "-mfma", "-mf16c")  # from the processor
TARGET = re.compile(r"#pragma GCC target\([^)]*\)")


def build(folder: Path) -> Path:
    """The library, whose instruction sets are avx512bf16 and amx."""
    for source in (*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"), EMULATED / "isas.cpp"):
        if source.parent == EMULATED or source.name not in LEFT_OUT:
            text = TARGET.sub("", source.read_text())
            (folder / source.name).write_text(text)

    def compile_one(source: Path) -> str:
        target = str(source.with_suffix(".o"))
        optimised = "-O1" if source.name.startswith(("scaled", "fp8", "four", "exact")) else "-O0"
        command = [
            "g++",
            optimised,
            *FLAGS,
            *TAKEN,
            f"-I{EMULATED}",
            "-c",
            str(source),
            "-o",
            target,
        ]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(2) as workers:
        objects = list(workers.map(compile_one, sorted(folder.glob("*.cpp"))))
    library = folder / "_cpu_kernels.so"
    subprocess.run(["g++", "-shared", "-pthread", *objects, "-o", str(library)], check=True)
    return library
