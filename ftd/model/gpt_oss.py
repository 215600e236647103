"""gpt-oss: gpt-oss-20b, gpt-oss-120b.

Attention sinks, a sliding window in every other layer, biases on all projections, on the router and
on the experts, and a clamped activation. The k largest logits choose, softmax over them weighs: the
same as softmax over all, normalised. Experts are stacked, rows of gate and up in turns.
Source: transformers' configuration_gpt_oss.py and modeling_gpt_oss.py, 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ftd.kernels.activation import GPT_OSS

from .architecture import Part
from .family import DecoderFamily
from .published import Published
from .reading import read_attention, read_model, read_moe, read_num_layers
from .spec import LayerSpec, ModelSpec, MoeSpec


class GptOss(DecoderFamily):
    model_types: tuple[str, ...] = ("gpt_oss",)
    router = "mlp.router"

    def spec(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        c = Published(config)
        c.choice("hidden_act", ("silu",), "silu")
        biased = c.flag("attention_bias", True)
        attention, scaled_context = read_attention(c, bias=biased, out_bias=biased)
        attention = replace(attention, sinks=True)
        windowed = replace(attention, window=c.integer("sliding_window", 128))
        sparse = replace(
            read_moe(c, inner="intermediate_size", normalise_topk=True),
            router_bias=True,
            bias=True,
            activation=replace(
                GPT_OSS,
                limit=c.number("swiglu_limit", GPT_OSS.limit),
                alpha=c.number("swiglu_alpha", GPT_OSS.alpha),
            ),
        )
        return read_model(
            c,
            generation_config,
            [
                LayerSpec(windowed if kind == "sliding_attention" else attention, sparse)
                for kind in _layer_types(c)
            ],
            model_type="gpt_oss",
            scaled_context=scaled_context,
            eps=1e-5,
        )

    def expert_parts(self, spec: ModelSpec, layer: int, expert: int) -> dict[str, Part]:
        mlp, H = spec.layers[layer].mlp, spec.hidden
        assert isinstance(mlp, MoeSpec)
        at = f"{self.at(layer)}.mlp.experts"
        E, inner = mlp.num_experts, mlp.inner
        both, down = f"{at}.gate_up_proj", f"{at}.down_proj"
        gates, ups = (0, 2 * inner), (1, 2 * inner)  # every other row
        return {
            "gate": Part(both, (E, H, 2 * inner), expert, gates, 2, transposed=True),
            "up": Part(both, (E, H, 2 * inner), expert, ups, 2, transposed=True),
            "down": Part(down, (E, inner, H), expert, transposed=True),
            "gate_bias": Part(f"{both}_bias", (E, 2 * inner), expert, gates, 2),
            "up_bias": Part(f"{both}_bias", (E, 2 * inner), expert, ups, 2),
            "down_bias": Part(f"{down}_bias", (E, H), expert),
        }


def _layer_types(c: Published) -> list[str]:
    num_layers, kinds = read_num_layers(c), ("sliding_attention", "full_attention")
    if "layer_types" not in c:
        return [kinds[layer % 2] for layer in range(num_layers)]
    return c.choices("layer_types", kinds, num_layers)
