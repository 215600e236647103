"""Every kernel compiles, at the shapes that serve, for GPUs that nobody here has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CAPABILITIES = (86, 89, 120)  # RTX 30, 40 and 50 series
SHARED_BYTES = 99 << 10  # what a program can have on each of them
COMPILE_ALL = Path(__file__).with_name("compile_all.py")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_kernels(capability, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(COMPILE_ALL), str(capability)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) > 50
    chained = {kernel["kernel"] for kernel in kernels if kernel["chained"]}
    assert (len(chained) > 20) if capability >= 90 else not chained, chained
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_BYTES, kernel
        assert not kernel["early_stores"], kernel
        # weights come from addresses that the compiler knows nothing of but our promise
        if kernel["kernel"] in ("_gate_up_kernel", "_down_kernel", "gate_up_scaled", "down_scaled"):
            assert kernel["wide_loads"] > 0, kernel
            scales = "scaled=True" in kernel["constants"]  # two of eight bits may be one load
            assert scales or not kernel["narrow_weight_loads"], kernel
