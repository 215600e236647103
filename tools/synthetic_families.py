"""The shapes of published models, and which tensors with which spread their layers hold.

A family gives config.json, and for each layer its tensors under their published names. Everything
random is small where it adds to the residual stream, so that the direction which all embeddings
share survives the layers, and with it the skew of the routers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from synthetic_formats import DENSE_TOO, FORMATS, Source, Stored, filled, given, power_of_two

SMALL = 0.15  # spread of what a layer adds to the residual stream
SHARE = math.sqrt(0.5)  # half of the energy of an embedding lies along the common direction

Tensors = dict[str, Stored]

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
    "hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu",
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    "attention_bias": False, "use_sliding_window": False,
}  # fmt: skip
QWEN3_5_MOE = {  # its text_config
    "model_type": "qwen3_5_moe_text", "dtype": "bfloat16", "hidden_size": 2048,
    "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
    "tie_word_embeddings": False, "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16",
    "hidden_size": 2880, "num_hidden_layers": 36, "num_local_experts": 128,
    "num_experts_per_tok": 4, "experts_per_token": 4, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
    "attention_bias": True, "sliding_window": 128, "swiglu_limit": 7.0, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 150000, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "initial_context_length": 4096,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip


class Family(ABC):
    """One model: ``c`` is its (text) config, all sizes are read from it."""

    formats: tuple[str, ...] = tuple(FORMATS)
    prefix = "model"
    norm = 1.0  # what norms hold
    router = "mlp.gate"

    def __init__(self, c: Mapping[str, Any], source: Source, skew: float, fmt: str) -> None:
        self.c, self.source, self.skew, self.format = c, source, skew, fmt
        self.hidden, self.layers = c["hidden_size"], c["num_hidden_layers"]
        self.vocab, self.top_k = c["vocab_size"], c["num_experts_per_tok"]
        self.std = 1 / math.sqrt(self.hidden)
        self.dense = fmt if fmt in DENSE_TOO else "bf16"
        common = source.wide(self.hidden)
        self.common = common / common.norm()

    @property
    def experts(self) -> int:
        return self.c.get("num_experts") or self.c["num_local_experts"]

    def config(self) -> dict[str, Any]:
        return dict(self.c)

    def ends(self) -> list[Tensors]:
        """What stands before and behind the layers, one file each."""
        own = self.source.normal(self.vocab, self.hidden, std=SHARE)
        shift = (self.common * math.sqrt(self.hidden) * SHARE).bfloat16()
        embedding = Stored(
            own.shape,
            own.dtype,
            # windows hold whole rows only where the width divides them: shift each by its place
            lambda rng: _shifted(own.pieces(rng), shift),
        )
        head = self.source.normal(self.vocab, self.hidden, std=self.std)
        return [
            {f"{self.prefix}.embed_tokens.weight": embedding},
            {f"{self.prefix}.norm.weight": self.norms(self.hidden), "lm_head.weight": head},
        ]

    def layer(self, layer: int) -> Tensors:
        tensors = {
            "input_layernorm.weight": self.norms(self.hidden),
            "post_attention_layernorm.weight": self.norms(self.hidden),
            f"{self.router}.weight": given(self.routing().bfloat16()),
            **self.mixer(layer),
            **self.mlp(),
        }
        return {f"{self.prefix}.layers.{layer}.{name}": t for name, t in tensors.items()}

    @abstractmethod
    def mixer(self, layer: int) -> Tensors: ...

    @abstractmethod
    def mlp(self) -> Tensors: ...

    def norms(self, size: int) -> Stored:
        return filled((size,), self.norm, torch.bfloat16)

    def routing(self) -> torch.Tensor:
        """The router [E, H]: expert e's logit is ``skew * g_e + N(0, 1)`` for a random token."""
        perpendicular = math.sqrt(self.hidden) * SHARE  # a token's own part after the norm
        popularity = self.source.wide(self.experts, 1)
        router = self.source.wide(self.experts, self.hidden) / perpendicular
        router -= (router @ self.common)[:, None] * self.common
        return router + self.skew * popularity * self.common / perpendicular

    def linear(self, module: str, rows: int, columns: int, std: float, fmt: str) -> Tensors:
        stored = FORMATS[fmt](self.source, rows, columns, std)
        return {f"{module}.{suffix}": tensor for suffix, tensor in stored}

    def attention(self, *, gated: bool = False, normed: bool = True) -> Tensors:
        c, H = self.c, self.hidden
        q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        tensors: Tensors = {}
        for name, rows in (("q", q * (1 + gated)), ("k", kv), ("v", kv)):
            tensors |= self.linear(f"self_attn.{name}_proj", rows, H, self.std, self.dense)
        tensors |= self.linear("self_attn.o_proj", H, q, SMALL / math.sqrt(q), self.dense)
        if normed:
            for name in ("q_norm", "k_norm"):
                tensors[f"self_attn.{name}.weight"] = self.norms(c["head_dim"])
        return tensors

    def gated_mlp(self, module: str, inner: int) -> Tensors:
        return {
            **self.linear(f"{module}.gate_proj", inner, self.hidden, self.std, self.format),
            **self.linear(f"{module}.up_proj", inner, self.hidden, self.std, self.format),
            **self.linear(
                f"{module}.down_proj", self.hidden, inner, SMALL / math.sqrt(inner), self.format
            ),
        }

    def separate_experts(self) -> Tensors:
        tensors: Tensors = {}
        for expert in range(self.experts):
            tensors |= self.gated_mlp(f"mlp.experts.{expert}", self.c["moe_intermediate_size"])
        return tensors


class Qwen3Moe(Family):
    def mixer(self, layer: int) -> Tensors:
        return self.attention()

    def mlp(self) -> Tensors:
        return self.separate_experts()


class Qwen3_5Moe(Family):
    """Delta nets and gated attention in turns, a shared expert; experts stacked in bf16 only."""

    formats = ("bf16", "fp8", "nvfp4")
    prefix = "model.language_model"
    norm = 0.0  # norms add one

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "tie_word_embeddings": False,
            "text_config": dict(self.c),
        }

    def mixer(self, layer: int) -> Tensors:
        if (layer + 1) % self.c["full_attention_interval"] == 0:
            return self.attention(gated=True)
        return self.delta_net()

    def delta_net(self) -> Tensors:
        c, H, at = self.c, self.hidden, "linear_attn"
        heads, size = c["linear_num_value_heads"], c["linear_value_head_dim"]
        keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * size
        channels, width = 2 * keys + values, c["linear_conv_kernel_dim"]
        spread = SMALL / math.sqrt(values)
        return {
            **self.linear(f"{at}.in_proj_qkv", channels, H, self.std, self.dense),
            **self.linear(f"{at}.in_proj_z", values, H, self.std, self.dense),
            **self.linear(f"{at}.in_proj_b", heads, H, self.std, "bf16"),
            **self.linear(f"{at}.in_proj_a", heads, H, self.std, "bf16"),
            **self.linear(f"{at}.out_proj", H, values, spread, self.dense),
            f"{at}.conv1d.weight": self.source.normal(channels, 1, width, std=0.5),
            f"{at}.A_log": given(torch.linspace(-3, 2, heads)),
            f"{at}.dt_bias": filled((heads,), -1.0, torch.bfloat16),
            f"{at}.norm.weight": filled((size,), 1.0, torch.float32),
        }

    def mlp(self) -> Tensors:
        c, H, E = self.c, self.hidden, self.experts
        shared = self.gated_mlp("mlp.shared_expert", c["shared_expert_intermediate_size"])
        shared |= self.linear("mlp.shared_expert_gate", 1, H, self.std, "bf16")
        if self.format != "bf16":
            return shared | self.separate_experts()
        inner = c["moe_intermediate_size"]
        down_std = SMALL / math.sqrt(inner)
        return shared | {
            "mlp.experts.gate_up_proj": self.source.normal(E, 2 * inner, H, std=self.std),
            "mlp.experts.down_proj": self.source.normal(E, H, inner, std=down_std),
        }


class GptOss(Family):
    """Sinks, windows, biases everywhere; experts stacked, in MXFP4 or transposed in bf16."""

    formats = ("mxfp4", "bf16")
    router = "mlp.router"

    def config(self) -> dict[str, Any]:
        kinds = ("sliding_attention", "full_attention")
        return {**self.c, "layer_types": [kinds[i % 2] for i in range(self.layers)]}

    def mixer(self, layer: int) -> Tensors:
        tensors, heads = self.attention(normed=False), self.c["num_attention_heads"]
        for name in ("q", "k", "v", "o"):
            at = f"self_attn.{name}_proj"
            tensors[f"{at}.bias"] = self.bias(tensors[f"{at}.weight"].shape[0])
        return tensors | {"self_attn.sinks": self.source.normal(heads)}

    def mlp(self) -> Tensors:
        E, H, inner, at = self.experts, self.hidden, self.c["intermediate_size"], "mlp.experts"
        down_std = SMALL / math.sqrt(inner)
        return {
            "mlp.router.bias": filled((E,), 0.0, torch.bfloat16),
            **self.stacked(f"{at}.gate_up_proj", E, 2 * inner, H, self.std),
            f"{at}.gate_up_proj_bias": self.bias(E, 2 * inner),
            **self.stacked(f"{at}.down_proj", E, H, inner, down_std),
            f"{at}.down_proj_bias": self.bias(E, H),
        }

    def stacked(self, name: str, experts: int, rows: int, columns: int, std: float) -> Tensors:
        if self.format == "bf16":
            return {name: self.source.normal(experts, columns, rows, std=std)}
        groups = columns // 32
        scale = power_of_two(std)
        return {
            f"{name}_blocks": self.source.codes(experts, rows, groups, 16),
            f"{name}_scales": filled((experts, rows, groups), scale, torch.uint8),
        }

    def bias(self, *shape: int) -> Stored:
        return self.source.normal(*shape, std=0.02)


def _shifted(pieces: Any, shift: torch.Tensor) -> Any:
    """Each piece plus ``shift``, which is repeated from the start of the tensor on."""
    at, H = 0, len(shift)
    for piece in pieces:
        whole = shift.roll(-at).repeat(-(-len(piece) // H))[: len(piece)]
        yield piece + whole
        at = (at + len(piece)) % H


_TINY = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
}  # fmt: skip
_TINY_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "shared_expert_intermediate_size": 64,
}  # fmt: skip
_TINY_MOE = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_TINY_OSS = {"num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 64}

PRESETS: dict[str, tuple[type[Family], dict[str, Any]]] = {
    "qwen3-30b-a3b": (Qwen3Moe, QWEN3_MOE),
    "qwen3.6-35b-a3b": (Qwen3_5Moe, QWEN3_5_MOE),
    "gpt-oss-120b": (GptOss, GPT_OSS),
    "tiny": (Qwen3Moe, QWEN3_MOE | _TINY | _TINY_MOE),
    "tiny-qwen3.6": (Qwen3_5Moe, QWEN3_5_MOE | _TINY | _TINY_DELTA | _TINY_MOE),
    "tiny-gpt-oss": (GptOss, GPT_OSS | _TINY | _TINY_OSS),
}
