"""A small checkpoint in the published layout of Qwen3-MoE, and an architecture that reads it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from ftd.errors import CheckpointError
from ftd.model.architecture import Part
from ftd.model.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "moe_intermediate_size": 8,
    "vocab_size": 64,
}
DTYPES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4}


class SmallArchitecture:
    """Norm, router and experts: enough to have dense tensors and parts of every kind."""

    model_types = ("qwen3_moe",)
    fused = False  # gate and up in one tensor per layer, experts stacked

    def spec(self, config):
        attention = AttentionSpec(2, 1, 16, None, 0.25)
        moe = MoeSpec(config["num_experts"], 2, config["moe_intermediate_size"], True)
        layers = (LayerSpec(attention, moe),) * config["num_hidden_layers"]
        return ModelSpec(
            "qwen3_moe", config["hidden_size"], config["vocab_size"], layers, 1e-6, True, 512, (1,)
        )

    def dense_tensors(self, spec):
        shapes = {"model.embed_tokens.weight": (spec.vocab, spec.hidden)}
        for i, layer in enumerate(spec.layers):
            shapes[f"model.layers.{i}.input_layernorm.weight"] = (spec.hidden,)
            shapes[f"model.layers.{i}.mlp.gate.weight"] = (layer.mlp.num_experts, spec.hidden)
        return shapes

    def expert_parts(self, spec, layer, expert):
        moe, prefix = spec.layers[layer].mlp, f"model.layers.{layer}.mlp.experts."
        h, i, e = spec.hidden, moe.inner, moe.num_experts
        if self.fused:
            both = (prefix + "gate_up_proj", (e, 2 * i, h), expert)
            return {
                "gate": Part(*both, rows=(0, i)),
                "up": Part(*both, rows=(i, 2 * i)),
                "down": Part(prefix + "down_proj", (e, h, i), expert),
            }
        one = f"{prefix}{expert}."
        return {
            "gate": Part(one + "gate_proj.weight", (i, h)),
            "up": Part(one + "up_proj.weight", (i, h)),
            "down": Part(one + "down_proj.weight", (h, i)),
        }

    def ignored(self, name):
        return name.startswith("mtp.")

    def build(self, spec, weights, ops, dtype):
        raise CheckpointError("not built in these tests")


class CheckpointMaker:
    """Writes the small checkpoint; ``tensors`` may be edited before ``write``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.architecture = SmallArchitecture()
        self.config = dict(CONFIG)
        self.dtype = "BF16"
        self.tensors: dict[str, tuple[str, tuple[int, ...], bytes | None]] = {}
        self.shards = 3

    @property
    def spec(self):
        return self.architecture.spec(self.config)

    def fill(self, *, zeros: bool = False) -> CheckpointMaker:
        """Every tensor that the architecture names, of random bytes or without data."""
        self.tensors.clear()
        rng, spec = np.random.default_rng(0), self.spec
        shapes = dict(self.architecture.dense_tensors(spec))
        for layer in spec.moe_layers:
            for e in range(spec.layers[layer].mlp.num_experts):
                parts = self.architecture.expert_parts(spec, layer, e).values()
                shapes |= {p.tensor: p.shape for p in parts}
        for name, shape in shapes.items():
            size = math.prod(shape) * DTYPES[self.dtype]
            self.tensors[name] = (self.dtype, shape, None if zeros else rng.bytes(size))
        return self

    def write_file(self, file: str, names: list[str]) -> None:
        """One safetensors file, tensors in the order given; those without data are zeros."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in names:
            dtype, shape, data = self.tensors[name]
            end = offset + (math.prod(shape) * DTYPES[dtype] if data is None else len(data))
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (self.path / file).open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                f.write(self.tensors[name][2] or b"")
            f.truncate(8 + len(text) + offset)  # zeros are a hole and cost no disk

    def write(self) -> Path:
        self.path.mkdir(exist_ok=True)
        names, index = sorted(self.tensors), {}
        for i in range(self.shards):
            file = (
                "model.safetensors"
                if self.shards == 1
                else f"model-{i + 1:05}-of-{self.shards:05}.safetensors"
            )
            mine = names[i * len(names) // self.shards : (i + 1) * len(names) // self.shards]
            self.write_file(file, mine)
            index |= dict.fromkeys(mine, file)
        if self.shards > 1:
            text = json.dumps({"metadata": {}, "weight_map": index})
            (self.path / "model.safetensors.index.json").write_text(text)
        (self.path / "config.json").write_text(json.dumps(self.config))
        (self.path / "tokenizer.json").write_text("{}")
        return self.path


@pytest.fixture
def maker(tmp_path) -> CheckpointMaker:
    return CheckpointMaker(tmp_path / "model").fill()
