"""The synthetic checkpoints load in every format, and their weights have the spread they should."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ftd.checkpoint.headers import check, read_checkpoint
from ftd.checkpoint.load import load_weights
from ftd.experts.host_pool import HostPool
from ftd.kernels.reference import expert_matrices
from ftd.model.registry import architecture_for

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from make_synthetic import PRESETS, SMALL, make
from synthetic_formats import FORMATS


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_synthetic_checkpoint_loads(tmp_path, fmt):
    shape = make(tmp_path, "tiny", layers=1, device="cpu", fmt=fmt)
    checkpoint = read_checkpoint(tmp_path)
    architecture = architecture_for(checkpoint.config)
    spec = architecture.spec(checkpoint.config)
    layout = check(checkpoint, architecture, spec)
    assert layout.format_name == fmt
    assert (layout.hidden, layout.inner) == (PRESETS["tiny"].hidden, PRESETS["tiny"].inner)
    pool = HostPool(1, shape.experts, layout, (0,))
    load_weights(checkpoint, architecture, spec, pool, lambda *_: None, lambda: False)
    experts = [expert_matrices(pool.address(0, e), layout) for e in range(shape.experts)]
    for matrices, std in zip(zip(*experts, strict=True), (1, 1, SMALL), strict=True):
        width = matrices[0].shape[1]
        spread = float(torch.stack(matrices).float().std()) * width**0.5 / std
        # scales of mxfp4 are powers of two
        assert spread == pytest.approx(1, rel=0.45 if fmt == "mxfp4" else 0.05)
    pool.close()
