"""Mixtral: Mixtral-8x7B, Mixtral-8x22B, and what was merged in their form.

Plain grouped-query attention, few wide experts, weights of the chosen always normalised.
Source: transformers' configuration_mixtral.py and modeling_mixtral.py, 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import DecoderFamily
from .published import Published
from .reading import read_attention, read_model, read_moe, read_num_layers
from .spec import LayerSpec, ModelSpec


class Mixtral(DecoderFamily):
    model_types: tuple[str, ...] = ("mixtral",)
    mlp = "block_sparse_moe"
    router = "block_sparse_moe.gate"
    expert = ("w1", "w3", "w2")  # gate, up, down

    def spec(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        c = Published(config)
        c.choice("hidden_act", ("silu",), "silu")
        # releases say null; a number counts for every layer
        window = c.integer("sliding_window") if "sliding_window" in c else None
        attention, scaled_context = read_attention(c, window=window)
        sparse = read_moe(c, inner="intermediate_size", normalise_topk=True)
        return read_model(
            c,
            generation_config,
            [LayerSpec(attention, sparse)] * read_num_layers(c),
            model_type="mixtral",
            scaled_context=scaled_context,
            eps=1e-5,
        )
