"""Qwen2-MoE: Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B.

Biases on q, k and v, softmax router whose weights are not normalised in releases, and a shared
expert weighted by a gate of its own.
Source: transformers' configuration_qwen2_moe.py and modeling_qwen2_moe.py, 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .family import DecoderFamily
from .published import Published
from .reading import read_attention, read_mlps, read_model, read_moe
from .spec import LayerSpec, ModelSpec, SharedSpec


class Qwen2Moe(DecoderFamily):
    model_types: tuple[str, ...] = ("qwen2_moe",)

    def spec(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        c = Published(config)
        c.choice("hidden_act", ("silu",), "silu")
        attention, scaled_context = read_attention(c, bias=c.flag("qkv_bias", True))
        sparse = read_moe(
            c,
            normalise_topk=c.flag("norm_topk_prob", False),
            shared=SharedSpec(c.integer("shared_expert_intermediate_size"), gated=True),
        )
        window = _window(c)
        windowed_layers = c.integer("max_window_layers", 28, least=0) if window else 0
        return read_model(
            c,
            generation_config,
            [
                # every other layer below max_window_layers has the window, from the first
                LayerSpec(
                    replace(attention, window=window)
                    if index % 2 == 0 and index < windowed_layers
                    else attention,
                    mlp,
                )
                for index, mlp in enumerate(read_mlps(c, sparse))
            ],
            model_type="qwen2_moe",
            scaled_context=scaled_context,
        )


def _window(c: Published) -> int | None:
    return c.integer("sliding_window", 4096) if c.flag("use_sliding_window", False) else None
