"""Synthetic checkpoints load and answer; their weights have the spread they should."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from ftd.checkpoint.headers import check, read_checkpoint
from ftd.checkpoint.load import load_weights
from ftd.engine.api import Sampling
from ftd.experts.host_pool import HostPool
from ftd.kernels.reference import expert_matrices
from ftd.model.registry import architecture_for

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from driving import answer_all, engine_core, request
from make_synthetic import make
from synthetic_families import PRESETS, SMALL
from synthetic_formats import Source

TINY = [(name, fmt) for name in PRESETS if "tiny" in name for fmt in PRESETS[name][0].formats]


@pytest.mark.parametrize(("preset", "fmt"), TINY)
def test_a_synthetic_checkpoint_loads(tmp_path, preset, fmt):
    made = make(tmp_path, preset, layers=1, fmt=fmt)
    checkpoint = read_checkpoint(tmp_path)
    architecture = architecture_for(checkpoint.config)
    spec = architecture.spec(checkpoint.config, checkpoint.generation_config)
    layout = check(checkpoint, architecture, spec)
    assert layout.format_name == fmt
    pool = HostPool(1, made.experts, layout, (0,))
    load_weights(checkpoint, architecture, spec, pool, lambda *_: None, lambda: False)
    experts = [expert_matrices(pool.address(0, e), layout) for e in range(made.experts)]
    for matrices, std in zip(zip(*experts, strict=True), (1, 1, SMALL), strict=True):
        width = matrices[0].shape[1]
        spread = float(torch.stack(matrices).float().std()) * width**0.5 / std
        # scales of mxfp4 are powers of two
        assert spread == pytest.approx(1, rel=0.45 if fmt == "mxfp4" else 0.05)
    pool.close()


@pytest.mark.parametrize("preset", [name for name in PRESETS if "tiny" in name])
def test_a_synthetic_checkpoint_answers(tmp_path, preset):
    """Alike in two chunkings and with the mixers of all kinds; drawn tokens, not one alone."""
    make(tmp_path, preset, layers=4)
    prompt, drawn = range(3, 40), Sampling(temperature=1.0, seed=1)
    tokens = []
    for chunk in (16, 64):
        with engine_core(tmp_path, prefill_chunk=chunk) as core:
            answers = answer_all(core, [request("one", prompt, 24, sampling=drawn)])
            tokens.append(answers["one"].tokens)
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 12


def test_routers_have_favourites(tmp_path):
    """Of skewed routers half of the experts take most of the choices."""
    kind, c = PRESETS["tiny"]
    shares = []  # of the choices that the more popular half gets
    for skew in (0.0, 1.0):
        family = kind(c, Source(0), skew, "bf16")
        tokens = next(family.ends()[0]["model.embed_tokens.weight"].pieces(random.Random(0)))
        x = tokens.float().view(-1, family.hidden)
        x = x / x.square().mean(1, keepdim=True).sqrt()
        chosen = (x @ family.routing().T).topk(2, 1).indices
        counts = torch.bincount(chosen.flatten(), minlength=family.experts).sort(descending=True)[0]
        shares.append(float(counts[: family.experts // 2].sum() / counts.sum()))
    even, skewed = shares
    assert even < 0.7
    assert skewed > 0.8
