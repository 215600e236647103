"""A model of two layers of each kind: what a rehearsal of the warm-up goes through."""

from __future__ import annotations

from pathlib import Path

import pytest
from lone_model import LoneModel

from ftd.kernels.reference import TorchOps

ORACLES = Path(__file__).parents[1] / "data" / "oracles"


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe-mixed", "qwen3_next", "gpt_oss"])
def test_the_first_two_of_each_kind_in_their_order(name):
    model = LoneModel(ORACLES / name, TorchOps()).model
    kept = model.of_each_kind()
    assert [layer for layer in model.layers if layer in kept.layers] == kept.layers
    mixers = [type(layer.mixer).__name__ for layer in model.layers]
    for mixer in set(mixers):
        first = [layer for layer, its in zip(model.layers, mixers) if its == mixer][:2]
        assert all(layer in kept.layers for layer in first)
    if name == "qwen3_moe":
        assert kept.layers == model.layers[:2] and len(model.layers) == 4
