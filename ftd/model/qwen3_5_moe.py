"""Qwen3.5-MoE: Qwen3.5-35B-A3B, Qwen3.6-35B-A3B, without their vision tower.

Qwen3-Next's layers under other names: the text model is nested in the config, the delta net's
projections are four matrices, and unquantised experts lie stacked and fused.
Source: transformers' configuration_qwen3_5_moe.py and modeling_qwen3_5_moe.py, 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .architecture import Part
from .delta import Projection
from .family import Shapes
from .published import Published
from .qwen3_next import DeltaFamily, read_delta_model
from .spec import DeltaSpec, ModelSpec, MoeSpec
from .weights import DenseWeights

_OF_ALL = ("tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id")  # may stand outside


class Qwen3_5Moe(DeltaFamily):
    model_types: tuple[str, ...] = ("qwen3_5_moe",)
    model = "model.language_model"

    def spec(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        c = Published(config).inner("text_config", also=_OF_ALL)
        c.choice("model_type", ("qwen3_5_moe_text",))
        # text alone: positions are the same in all three axes, so mrope is plain rope
        return read_delta_model(c, generation_config, self.model_types[0], normalise_topk=True)

    def ignored(self, name: str) -> bool:
        return name.startswith("model.visual.") or super().ignored(name)

    def projection_tensors(self, at: str, hidden: int, spec: DeltaSpec) -> Shapes:
        return {
            f"{at}.in_proj_qkv.weight": (spec.channels, hidden),
            f"{at}.in_proj_z.weight": (spec.num_value_heads * spec.value_dim, hidden),
            f"{at}.in_proj_b.weight": (spec.num_value_heads, hidden),
            f"{at}.in_proj_a.weight": (spec.num_value_heads, hidden),
        }

    def build_projections(
        self, dense: DenseWeights, at: str, spec: DeltaSpec
    ) -> tuple[Projection, Projection]:
        return (
            dense.fused([f"{at}.in_proj_{part}" for part in ("qkv", "z")]),
            dense.fused([f"{at}.in_proj_{part}" for part in ("b", "a")], torch.float32),
        )

    def expert_parts(self, spec: ModelSpec, layer: int, expert: int) -> dict[str, Part]:
        mlp = spec.layers[layer].mlp
        assert isinstance(mlp, MoeSpec), layer
        at, E, inner, H = f"{self.at(layer)}.mlp.experts", mlp.num_experts, mlp.inner, spec.hidden
        fused = f"{at}.gate_up_proj", (E, 2 * inner, H), expert
        gate, up, down = (f"{at}.{expert}.{name}.weight" for name in self.expert)
        return {  # quantised releases have a matrix for each expert
            "gate": Part(*fused, (0, inner), apart=gate),
            "up": Part(*fused, (inner, 2 * inner), apart=up),
            "down": Part(f"{at}.down_proj", (E, H, inner), expert, apart=down),
        }


class Qwen3_5MoeText(Qwen3_5Moe):
    """The text model by itself."""

    model_types: tuple[str, ...] = ("qwen3_5_moe_text",)
    model = "model"

    def spec(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        return super().spec({"text_config": config}, generation_config)
