"""The real architecture on whole checkpoints: what lands in memory is what safetensors reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ftd.checkpoint.headers import check, read_checkpoint
from ftd.checkpoint.load import load_weights
from ftd.checkpoint.source import resolve
from ftd.experts.host_pool import HostPool
from ftd.model.registry import architecture_for
from ftd.model.spec import MoeSpec

TINY = sorted((Path(__file__).parents[1] / "data" / "oracles").glob("*/config.json"))


@pytest.mark.parametrize(
    "path", [resolve("demo").path, *(file.parent for file in TINY)], ids=lambda p: p.name
)
def test_loaded_bytes_equal_those_of_the_safetensors_library(path: Path):
    checkpoint = read_checkpoint(path)
    architecture = architecture_for(checkpoint.config)
    spec = architecture.spec(checkpoint.config, checkpoint.generation_config)
    layout = check(checkpoint, architecture, spec)
    mlp = spec.layers[spec.moe_layers[0]].mlp
    assert isinstance(mlp, MoeSpec)
    pool = HostPool(len(spec.moe_layers), mlp.num_experts, layout, spec.moe_layers)
    dense = load_weights(checkpoint, architecture, spec, pool, lambda *_: None, lambda: False)

    want: dict[str, torch.Tensor] = {}
    for file in checkpoint.files:
        want |= load_file(file)
    for name, tensor in dense.items():
        assert torch.equal(tensor, want.pop(name)), name
    for layer in spec.moe_layers:
        for expert in range(mlp.num_experts):
            parts = architecture.expert_parts(spec, layer, expert)
            record = torch.from_numpy(pool.record(layer, expert)).view(layout.format.dtype)
            matrices = [want.pop(parts[name].tensor).reshape(-1) for name in ("gate", "up", "down")]
            assert torch.equal(record[: 3 * mlp.inner * spec.hidden], torch.cat(matrices))
    assert all(architecture.ignored(name) for name in want), want.keys()
    pool.close()
