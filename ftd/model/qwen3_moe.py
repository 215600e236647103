"""Qwen3-MoE: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder.

Grouped-query attention with a norm per head of q and k, softmax router, no shared expert.
Source: transformers' configuration_qwen3_moe.py and modeling_qwen3_moe.py, 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import DecoderFamily
from .published import Published
from .reading import read_attention, read_mlps, read_model, read_moe
from .spec import LayerSpec, ModelSpec


class Qwen3Moe(DecoderFamily):
    model_types: tuple[str, ...] = ("qwen3_moe",)

    def spec(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        c = Published(config)
        c.choice("hidden_act", ("silu",), "silu")
        # transformers gives every layer the window, whatever max_window_layers says
        windowed = c.flag("use_sliding_window", False)
        biased = c.flag("attention_bias", False)
        attention, scaled_context = read_attention(
            c,
            qk_norm="head",
            bias=biased,
            out_bias=biased,
            window=c.integer("sliding_window") if windowed else None,
        )
        sparse = read_moe(c, normalise_topk=c.flag("norm_topk_prob", False))
        return read_model(
            c,
            generation_config,
            [LayerSpec(attention, mlp) for mlp in read_mlps(c, sparse)],
            model_type="qwen3_moe",
            scaled_context=scaled_context,
        )
