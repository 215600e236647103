"""Qwen3-Next: Qwen3-Next-80B-A3B, Qwen3-Coder-Next; what Qwen3.5 shares with it, too.

Three gated delta nets, then a layer of gated attention, and so on; a shared expert with a gate;
norms whose weights are stored less one, but for the one inside the delta net.
Source: transformers' configuration_qwen3_next.py and modeling_qwen3_next.py, 5.24.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from ftd.kernels.delta import DeltaWeights

from .delta import DeltaNet, Projection, reordered
from .family import DecoderFamily, Shapes
from .layers import Block
from .published import Published
from .reading import read_attention, read_mlps, read_model, read_moe, read_num_layers
from .rope import Rotary
from .spec import AttentionSpec, DeltaSpec, LayerSpec, ModelSpec, SharedSpec
from .weights import DenseWeights

_KINDS = ("linear_attention", "full_attention")
_ROTARY_FACTOR = 0.25  # where a config gives none


class DeltaFamily(DecoderFamily):
    """Delta nets and gated attention in turns: how the parts are called, and built."""

    delta = "linear_attn"
    norm_offset = 1.0

    def ignored(self, name: str) -> bool:
        return name.startswith("mtp.") or super().ignored(name)

    def mixer_tensors(self, spec: ModelSpec, layer: int) -> Shapes:
        mixer = spec.layers[layer].mixer
        if isinstance(mixer, AttentionSpec):
            return super().mixer_tensors(spec, layer)
        at = f"{self.at(layer)}.{self.delta}"
        return self.projection_tensors(at, spec.hidden, mixer) | {
            f"{at}.conv1d.weight": (mixer.channels, 1, mixer.conv_width),
            f"{at}.A_log": (mixer.num_value_heads,),
            f"{at}.dt_bias": (mixer.num_value_heads,),
            f"{at}.norm.weight": (mixer.value_dim,),
            f"{at}.out_proj.weight": (spec.hidden, mixer.num_value_heads * mixer.value_dim),
        }

    def build_mixer(
        self, dense: DenseWeights, spec: ModelSpec, layer: int, rotary: Rotary | None
    ) -> Block:
        mixer = spec.layers[layer].mixer
        if isinstance(mixer, AttentionSpec):
            return super().build_mixer(dense, spec, layer, rotary)
        at, ops = f"{self.at(layer)}.{self.delta}", dense.ops
        conv = dense.tensor(f"{at}.conv1d.weight").float()
        qkvz, ba = self.build_projections(dense, at, mixer)
        return DeltaNet(
            ops,
            spec.place(layer),
            qkvz=qkvz,
            ba=ba,
            weights=DeltaWeights(
                mixer.num_key_heads,
                mixer.num_value_heads,
                mixer.key_dim,
                mixer.value_dim,
                conv=conv.squeeze(1).T.contiguous(),
                rate=-dense.tensor(f"{at}.A_log").double().exp(),
                bias=dense.tensor(f"{at}.dt_bias").double(),
                norm=dense.tensor(f"{at}.norm.weight").float(),
                norm_eps=spec.norm_eps,
            ),
            out=dense.linear(f"{at}.out_proj", torch.float32),
        )

    @abstractmethod
    def projection_tensors(self, at: str, hidden: int, spec: DeltaSpec) -> Shapes:
        """The matrices that make q, k, v, z, b and a."""

    @abstractmethod
    def build_projections(
        self, dense: DenseWeights, at: str, spec: DeltaSpec
    ) -> tuple[Projection, Projection]:
        """To q, k, v and z, and to b and a."""


class Qwen3Next(DeltaFamily):
    model_types: tuple[str, ...] = ("qwen3_next",)

    def spec(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        c = Published(config)
        return read_delta_model(
            c, generation_config, "qwen3_next", normalise_topk=c.flag("norm_topk_prob", True)
        )

    def projection_tensors(self, at: str, hidden: int, spec: DeltaSpec) -> Shapes:
        values = spec.num_value_heads * spec.value_dim
        return {
            f"{at}.in_proj_qkvz.weight": (spec.channels + values, hidden),
            f"{at}.in_proj_ba.weight": (2 * spec.num_value_heads, hidden),
        }

    def build_projections(
        self, dense: DenseWeights, at: str, spec: DeltaSpec
    ) -> tuple[Projection, Projection]:
        """Rows are grouped by key head: its q, its k, v and z of those it serves; likewise b, a."""
        heads, served = spec.num_key_heads, spec.num_value_heads // spec.num_key_heads
        values = served * spec.value_dim
        return (
            reordered(
                dense.linear(f"{at}.in_proj_qkvz"),
                _ungrouped(heads, (spec.key_dim, spec.key_dim, values, values), dense.device),
            ),
            reordered(
                dense.linear(f"{at}.in_proj_ba", torch.float32),
                _ungrouped(heads, (served, served), dense.device),
            ),
        )


def _ungrouped(num_groups: int, parts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The order that has the first part of every group, then every second part, and so on."""
    rows = torch.arange(num_groups * sum(parts), device=device).view(num_groups, -1)
    return torch.cat([part.flatten() for part in rows.split(parts, dim=1)])


def read_delta_model(
    c: Published,
    generation_config: Mapping[str, Any] | None,
    model_type: str,
    *,
    normalise_topk: bool,
) -> ModelSpec:
    c.choice("hidden_act", ("silu",), "silu")
    head_dim = c.integer("head_dim", 256)
    rope = c.inner("rope_parameters")
    factor = c.number("partial_rotary_factor", _ROTARY_FACTOR, most=1.0)
    rotary_dim = int(head_dim * rope.number("partial_rotary_factor", factor, most=1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        c.refuse("partial_rotary_factor", f"one that turns pairs of {head_dim} channels")
    biased = c.flag("attention_bias", False)
    attention, scaled_context = read_attention(
        c, qk_norm="head", bias=biased, out_bias=biased, rotary_dim=rotary_dim, gated=True
    )
    sparse = read_moe(
        c,
        normalise_topk=normalise_topk,
        shared=SharedSpec(c.integer("shared_expert_intermediate_size"), gated=True),
    )
    delta = _read_delta(c)
    return read_model(
        c,
        generation_config,
        [
            LayerSpec(delta if kind == "linear_attention" else attention, mlp)
            for kind, mlp in zip(_read_kinds(c), read_mlps(c, sparse), strict=True)
        ],
        model_type=model_type,
        scaled_context=scaled_context,
    )


def _read_delta(c: Published) -> DeltaSpec:
    spec = DeltaSpec(
        num_key_heads=c.integer("linear_num_key_heads"),
        num_value_heads=c.integer("linear_num_value_heads"),
        key_dim=c.integer("linear_key_head_dim"),
        value_dim=c.integer("linear_value_head_dim"),
        conv_width=c.integer("linear_conv_kernel_dim", least=2, most=64),
    )
    if spec.num_value_heads % spec.num_key_heads:
        c.refuse("linear_num_value_heads", f"a multiple of {spec.num_key_heads} key heads")
    return spec


def _read_kinds(c: Published) -> list[str]:
    """Which kind of mixer each layer has."""
    num_layers = read_num_layers(c)
    if "layer_types" in c:
        return c.choices("layer_types", _KINDS, num_layers)
    every = c.integer("full_attention_interval", 4)
    return [_KINDS[(index + 1) % every == 0] for index in range(num_layers)]
