"""What families share in how config.json spells attention, experts and the model as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .published import Published
from .rope import read_rope
from .spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoeSpec, SharedSpec

MAX_LAYERS = 1024  # ten times the deepest model: a config beyond it is damaged


def read_num_layers(c: Published) -> int:
    return c.integer("num_hidden_layers", most=MAX_LAYERS)


def read_attention(
    c: Published,
    *,
    qk_norm: Literal["head", "width"] | None = None,
    bias: bool = False,  # of q, k and v
    out_bias: bool = False,
    softmax_scale: float | None = None,  # None: head_dim ** -0.5
    window: int | None = None,
    rotary_dim: int | None = None,  # None: all channels of a head turn
    gated: bool = False,
) -> tuple[AttentionSpec, int]:
    """Grouped-query attention with rope, and the context that a rope scaling was made for."""
    hidden, num_heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    num_kv_heads = c.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        c.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    if "head_dim" not in c and hidden % num_heads:
        c.refuse("head_dim", f"a number: {num_heads} heads do not divide hidden_size {hidden}")
    head_dim = c.integer("head_dim", hidden // num_heads)
    if head_dim % 2:
        c.refuse("head_dim", "an even number: rope turns pairs of channels")
    rope, scaled_context = read_rope(c, rotary_dim or head_dim)
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        softmax_scale=softmax_scale or head_dim**-0.5,
        qk_norm=qk_norm,
        bias=bias,
        out_bias=out_bias,
        window=window,
        gated=gated,
    )
    return spec, scaled_context


def read_moe(
    c: Published,
    *,
    inner: str = "moe_intermediate_size",  # the key of the experts' width
    normalise_topk: bool,
    shared: SharedSpec | None = None,
) -> MoeSpec:
    # transformers writes a word of its own for it when it saves a config again
    experts_key = "num_local_experts" if "num_local_experts" in c else "num_experts"
    spec = MoeSpec(
        num_experts=c.integer(experts_key),
        experts_per_token=c.integer("num_experts_per_tok"),
        inner=c.integer(inner),
        normalise_topk=normalise_topk,
        shared=shared,
    )
    if spec.experts_per_token > spec.num_experts:
        c.refuse("num_experts_per_tok", f"at most the number of experts, {spec.num_experts}")
    return spec


def read_mlps(c: Published, sparse: MoeSpec) -> list[DenseSpec | MoeSpec]:
    """The feed-forward block of each layer, where Qwen's keys make some of them dense."""
    num_layers, every = read_num_layers(c), c.integer("decoder_sparse_step", 1)
    dense_at = c.indices("mlp_only_layers", num_layers)
    dense_at |= {i for i in range(num_layers) if (i + 1) % every}
    mlps: list[DenseSpec | MoeSpec] = [sparse] * num_layers
    for layer in dense_at:
        mlps[layer] = DenseSpec(c.integer("intermediate_size"))
    return mlps


def read_model(
    c: Published,
    generation_config: Mapping[str, Any] | None,
    layers: Sequence[LayerSpec],
    *,
    model_type: str,
    scaled_context: int = 0,  # what a rope scaling extends the context to
    eps: float = 1e-6,  # where config.json gives none
    **scales: float,  # embedding_scale, residual_scale, logit_scale
) -> ModelSpec:
    generation = Published(generation_config or {}, "generation_config.json")
    dtype = "dtype" if "dtype" in c else "torch_dtype"
    return ModelSpec(
        model_type=model_type,
        hidden=c.integer("hidden_size"),
        vocab=c.integer("vocab_size"),
        layers=tuple(layers),
        norm_eps=c.number("rms_norm_eps", eps),
        tied_head=c.flag("tie_word_embeddings", False),
        context=max(c.integer("max_position_embeddings"), scaled_context),
        # what ends an answer: both files together
        eos_ids=tuple(dict.fromkeys(i for f in (c, generation) for i in f.token_ids(EOS))),
        dtype=c.choice(dtype, ("bfloat16", "float16", "float32"), "bfloat16"),
        **scales,
    )


EOS = "eos_token_id"
