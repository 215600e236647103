"""OLMoE: OLMoE-1B-7B.

The norm of q and k goes over all heads together; the router's weights are not normalised.
Source: transformers' configuration_olmoe.py and modeling_olmoe.py, 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftd.errors import UnsupportedModel

from .family import DecoderFamily
from .published import Published
from .reading import read_attention, read_model, read_moe, read_num_layers
from .spec import LayerSpec, ModelSpec


class Olmoe(DecoderFamily):
    model_types: tuple[str, ...] = ("olmoe",)

    def spec(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        c = Published(config)
        c.choice("hidden_act", ("silu",), "silu")
        if "clip_qkv" in c:
            raise UnsupportedModel(
                f"config.json: clip_qkv is {config['clip_qkv']!r:.80}: attention inputs are "
                "not clipped here",
                hint="releases of OLMoE say null",
            )
        biased = c.flag("attention_bias", False)
        attention, scaled_context = read_attention(c, qk_norm="width", bias=biased, out_bias=biased)
        sparse = read_moe(
            c, inner="intermediate_size", normalise_topk=c.flag("norm_topk_prob", False)
        )
        return read_model(
            c,
            generation_config,
            [LayerSpec(attention, sparse)] * read_num_layers(c),
            model_type="olmoe",
            scaled_context=scaled_context,
            eps=1e-5,
        )
