"""Qwen3-MoE: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder.

Grouped-query attention with a norm per head of q and k, softmax router, no shared expert.
Source: transformers' configuration_qwen3_moe.py and modeling_qwen3_moe.py, 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from ftd.kernels.ops import Ops

from .architecture import Part
from .decoder import Decoder, Layer
from .layers import Attention, Block, DenseMlp, Embedding, Linear, SparseMlp
from .published import Published
from .rope import Rotary, read_rope
from .spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoeSpec
from .weights import DenseWeights

MAX_LAYERS = 1024  # ten times the deepest model: a config beyond it is damaged


class Qwen3Moe:
    """``ftd.model.architecture.Architecture``."""

    model_types: tuple[str, ...] = ("qwen3_moe",)

    def spec(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        c = Published(config)
        c.choice("hidden_act", ("silu",), "silu")
        num_layers = c.integer("num_hidden_layers", most=MAX_LAYERS)
        attention, scaled_context = _attention(c)
        # transformers writes its own word for it when it saves a config again
        experts_key = "num_local_experts" if "num_local_experts" in c else "num_experts"
        sparse = MoeSpec(
            num_experts=c.integer(experts_key),
            experts_per_token=c.integer("num_experts_per_tok"),
            inner=c.integer("moe_intermediate_size"),
            normalise_topk=c.flag("norm_topk_prob", False),
        )
        if sparse.experts_per_token > sparse.num_experts:
            c.refuse("num_experts_per_tok", f"at most the number of experts, {sparse.num_experts}")
        every = c.integer("decoder_sparse_step", 1)
        dense_at = c.indices("mlp_only_layers", num_layers)
        dense_at |= {i for i in range(num_layers) if (i + 1) % every}
        mlps: list[DenseSpec | MoeSpec] = [sparse] * num_layers
        for layer in dense_at:
            mlps[layer] = DenseSpec(c.integer("intermediate_size"))
        return ModelSpec(
            model_type="qwen3_moe",
            hidden=c.integer("hidden_size"),
            vocab=c.integer("vocab_size"),
            layers=tuple(LayerSpec(attention, mlp) for mlp in mlps),
            norm_eps=c.number("rms_norm_eps", 1e-6),
            tied_head=c.flag("tie_word_embeddings", False),
            context=max(c.integer("max_position_embeddings"), scaled_context),
            eos_ids=_eos_ids(c, Published(generation_config or {}, "generation_config.json")),
            dtype=_dtype(c),
        )

    def dense_tensors(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        H = spec.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (spec.vocab, H),
            "model.norm.weight": (H,),
        }
        if not spec.tied_head:
            shapes["lm_head.weight"] = (spec.vocab, H)
        for index, layer in enumerate(spec.layers):
            at = f"model.layers.{index}"
            shapes[f"{at}.input_layernorm.weight"] = (H,)
            shapes[f"{at}.post_attention_layernorm.weight"] = (H,)
            shapes |= _attention_shapes(f"{at}.self_attn", H, layer.attention)
            if isinstance(layer.mlp, MoeSpec):
                shapes[f"{at}.mlp.gate.weight"] = (layer.mlp.num_experts, H)
            else:
                shapes[f"{at}.mlp.gate_proj.weight"] = (layer.mlp.inner, H)
                shapes[f"{at}.mlp.up_proj.weight"] = (layer.mlp.inner, H)
                shapes[f"{at}.mlp.down_proj.weight"] = (H, layer.mlp.inner)
        return shapes

    def expert_parts(self, spec: ModelSpec, layer: int, expert: int) -> dict[str, Part]:
        mlp = spec.layers[layer].mlp
        at = f"model.layers.{layer}.mlp.experts.{expert}"
        return {
            "gate": Part(f"{at}.gate_proj.weight", (mlp.inner, spec.hidden)),
            "up": Part(f"{at}.up_proj.weight", (mlp.inner, spec.hidden)),
            "down": Part(f"{at}.down_proj.weight", (spec.hidden, mlp.inner)),
        }

    def ignored(self, name: str) -> bool:
        # a head beside tied embeddings repeats them; old files keep the rope's frequencies
        return name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq")

    def build(
        self,
        spec: ModelSpec,
        weights: MutableMapping[str, torch.Tensor],
        ops: Ops,
        dtype: torch.dtype,
    ) -> Decoder:
        dense = DenseWeights(weights, ops, dtype, spec.norm_eps)
        rope = spec.layers[0].attention.rope
        rotary = Rotary(rope, dense.device) if rope else None
        layers = []
        for index, layer in enumerate(spec.layers):
            at = f"model.layers.{index}"
            attention = Attention(
                ops,
                layer.attention,
                index,
                qkv=dense.fused([f"{at}.self_attn.{x}_proj" for x in "qkv"]),
                out=dense.linear(f"{at}.self_attn.o_proj", torch.float32),
                rotary=rotary,
                q_norm=dense.norm(f"{at}.self_attn.q_norm"),
                k_norm=dense.norm(f"{at}.self_attn.k_norm"),
            )
            mlp: Block
            if isinstance(layer.mlp, MoeSpec):
                mlp = SparseMlp(layer.mlp, index, dense.linear(f"{at}.mlp.gate", torch.float32))
            else:
                mlp = DenseMlp(
                    ops,
                    gate=dense.linear(f"{at}.mlp.gate_proj"),
                    up=dense.linear(f"{at}.mlp.up_proj"),
                    down=dense.linear(f"{at}.mlp.down_proj", torch.float32),
                )
            layers.append(
                Layer(
                    dense.norm(f"{at}.input_layernorm"),
                    attention,
                    dense.norm(f"{at}.post_attention_layernorm"),
                    mlp,
                )
            )
        embedding = dense.tensor("model.embed_tokens.weight")
        head = embedding if spec.tied_head else dense.tensor("lm_head.weight")
        norm = dense.norm("model.norm")
        dense.finish()
        return Decoder(
            spec, Embedding(embedding), layers, norm, Linear(ops, head, out_dtype=torch.float32)
        )


def _attention(c: Published) -> tuple[AttentionSpec, int]:
    """The attention of every layer, and the context that a rope scaling was made for."""
    hidden, num_heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    num_kv_heads = c.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        c.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    if "head_dim" not in c and hidden % num_heads:
        c.refuse("head_dim", f"a number: {num_heads} heads do not divide hidden_size {hidden}")
    head_dim = c.integer("head_dim", hidden // num_heads)
    if head_dim % 2:
        c.refuse("head_dim", "an even number: rope turns pairs of channels")
    rope, scaled_context = read_rope(c, head_dim)
    # transformers gives every layer the window, whatever max_window_layers says
    windowed = c.flag("use_sliding_window", False)
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        softmax_scale=head_dim**-0.5,
        qk_norm=True,
        bias=c.flag("attention_bias", False),
        window=c.integer("sliding_window") if windowed else None,
    )
    return spec, scaled_context


def _attention_shapes(at: str, hidden: int, spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}.q_proj.weight": (q, hidden),
        f"{at}.k_proj.weight": (kv, hidden),
        f"{at}.v_proj.weight": (kv, hidden),
        f"{at}.o_proj.weight": (hidden, q),
        f"{at}.q_norm.weight": (spec.head_dim,),
        f"{at}.k_norm.weight": (spec.head_dim,),
    }
    if spec.bias:
        shapes |= {f"{at}.{x}_proj.bias": (rows,) for x, rows in zip("qkvo", (q, kv, kv, hidden))}
    return shapes


def _eos_ids(*configs: Published) -> tuple[int, ...]:
    """What ends an answer: config.json and generation_config.json together."""
    return tuple(dict.fromkeys(i for c in configs for i in c.token_ids("eos_token_id")))


def _dtype(c: Published) -> str:
    key = "dtype" if "dtype" in c else "torch_dtype"
    return c.choice(key, ("bfloat16", "float16", "float32"), "bfloat16")
