"""Granite-MoE: Granite 3.0 and 3.1, 1B-A400M and 3B-A800M.

Four multipliers: on embeddings, on what blocks add, on attention scores in place of
head_dim ** -0.5, and under the logits. The k largest logits choose, softmax over them weighs: the
same as softmax over all, normalised. Experts are stacked, gate and up in one tensor.
Source: transformers' configuration_granitemoe.py and modeling_granitemoe.py, 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .architecture import Part
from .family import DecoderFamily
from .published import Published
from .reading import read_attention, read_model, read_moe, read_num_layers
from .spec import LayerSpec, ModelSpec, MoeSpec


class GraniteMoe(DecoderFamily):
    model_types: tuple[str, ...] = ("granitemoe",)
    mlp = "block_sparse_moe"
    router = "block_sparse_moe.router.layer"

    def spec(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        c = Published(config)
        c.choice("hidden_act", ("silu",), "silu")
        biased = c.flag("attention_bias", False)
        attention, scaled_context = read_attention(
            c, bias=biased, out_bias=biased, softmax_scale=c.number("attention_multiplier", 1.0)
        )
        sparse = read_moe(c, inner="intermediate_size", normalise_topk=True)
        return read_model(
            c,
            generation_config,
            [LayerSpec(attention, sparse)] * read_num_layers(c),
            model_type="granitemoe",
            scaled_context=scaled_context,
            embedding_scale=c.number("embedding_multiplier", 1.0),
            residual_scale=c.number("residual_multiplier", 1.0),
            logit_scale=c.number("logits_scaling", 1.0),
        )

    def expert_parts(self, spec: ModelSpec, layer: int, expert: int) -> dict[str, Part]:
        mlp, H = spec.layers[layer].mlp, spec.hidden
        assert isinstance(mlp, MoeSpec)
        E, inner = mlp.num_experts, mlp.inner
        both = f"{self.at(layer)}.{self.mlp}.input_linear.weight"
        down = f"{self.at(layer)}.{self.mlp}.output_linear.weight"
        return {
            "gate": Part(both, (E, 2 * inner, H), expert, (0, inner)),
            "up": Part(both, (E, 2 * inner, H), expert, (inner, 2 * inner)),
            "down": Part(down, (E, H, inner), expert),
        }
