"""Kernels are compiled side by side; rehearsing a warm-up needs nothing that they would write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

REHEARSAL = Path(__file__).with_name("rehearsal.py")


def run(cache: Path, *arguments: str) -> dict:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, str(REHEARSAL), *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_launches_compile_and_leave_zeros(tmp_path):
    done = run(tmp_path)
    assert done["zeros"] and done["after"]
    assert len(list(tmp_path.rglob("*.cubin"))) == len(done["found"]) == 4
    assert all(done["found"]) and all(done["stubs"])


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("qwen3_moe", "_group_kernel"), ("gpt_oss-mxfp4", "gate_up"), ("qwen3_5_moe", "_scan_kernel")],
)
def test_a_rehearsal_finds_every_kernel_of_the_warm_up(name, kernel, tmp_path):
    kernels = run(tmp_path, name)
    assert not kernels["missing"]
    assert any(kernel in found for found in kernels["found"]), kernels


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss-mxfp4", "qwen3_5_moe"])
def test_a_start_on_a_gpu_compiles_nothing_after_its_rehearsal(name, tmp_path):
    kernels = run(tmp_path, "gpu", name)
    assert kernels["found"] > 20
    assert not kernels["missing"]


TORCH_FREE = """
import sys
from ftd.cuda import compiler
from ftd.lazy import put_off
put_off("torch")
from ftd.kernels.triton.keys import settle_keys
settle_keys()
assert "torch._C" not in sys.modules
"""


def test_the_process_that_compiles_imports_no_torch():
    """It would take longer than compiling."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", TORCH_FREE], env=environment, check=True)
