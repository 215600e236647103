"""What families of decoders share: the names of tensors, and the model that is built of them.

A family's file says how its config.json is spelled and where its names differ; shapes and layers
follow from the spec. What no other family has, it overrides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from ftd.kernels.formats import Matrix
from ftd.kernels.ops import Ops

from .architecture import Part
from .decoder import Decoder, Layer
from .layers import Attention, Block, DenseMlp, Embedding, Linear, SharedExpert, SparseMlp
from .rope import Rotary
from .spec import AttentionSpec, DenseSpec, ModelSpec, MoeSpec
from .weights import DenseWeights

Shapes = dict[str, tuple[int, ...]]


class DecoderFamily(ABC):
    """``ftd.model.architecture.Architecture``, but for ``spec``."""

    model_types: tuple[str, ...]

    # names: of the model's parts, then of a layer's
    model = "model"
    head = "lm_head"
    attention = "self_attn"
    mlp = "mlp"
    router = "mlp.gate"
    shared = "mlp.shared_expert"
    shared_gate = "mlp.shared_expert_gate"
    expert = ("gate_proj", "up_proj", "down_proj")
    norm_offset = 0.0  # what is added to the weights of norms: 1, where they are stored as 1 + w

    @abstractmethod
    def spec(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec: ...

    def ignored(self, name: str) -> bool:
        # a head beside tied embeddings repeats them; old files keep the rope's frequencies
        return name == f"{self.head}.weight" or name.endswith(".rotary_emb.inv_freq")

    def expert_parts(self, spec: ModelSpec, layer: int, expert: int) -> dict[str, Part]:
        at = f"{self.at(layer)}.{self.mlp}.experts.{expert}"
        inner, hidden = _moe(spec, layer).inner, spec.hidden
        gate, up, down = self.expert
        return {
            "gate": Part(f"{at}.{gate}.weight", (inner, hidden)),
            "up": Part(f"{at}.{up}.weight", (inner, hidden)),
            "down": Part(f"{at}.{down}.weight", (hidden, inner)),
        }

    def dense_tensors(self, spec: ModelSpec) -> Shapes:
        H = spec.hidden
        shapes: Shapes = {
            f"{self.model}.embed_tokens.weight": (spec.vocab, H),
            f"{self.model}.norm.weight": (H,),
        }
        if not spec.tied_head:
            shapes[f"{self.head}.weight"] = (spec.vocab, H)
        for index in range(len(spec.layers)):
            at = self.at(index)
            shapes[f"{at}.input_layernorm.weight"] = (H,)
            shapes[f"{at}.post_attention_layernorm.weight"] = (H,)
            shapes |= self.mixer_tensors(spec, index)
            shapes |= self.mlp_tensors(spec, index)
        return shapes

    def mixer_tensors(self, spec: ModelSpec, layer: int) -> Shapes:
        at = f"{self.at(layer)}.{self.attention}"
        return attention_tensors(at, spec.hidden, spec.layers[layer].attention)

    def mlp_tensors(self, spec: ModelSpec, layer: int) -> Shapes:
        at, mlp, H = self.at(layer), spec.layers[layer].mlp, spec.hidden
        if isinstance(mlp, DenseSpec):
            return mlp_tensors(f"{at}.{self.mlp}", H, mlp.inner)
        shapes: Shapes = {f"{at}.{self.router}.weight": (mlp.num_experts, H)}
        if mlp.router_bias:
            shapes[f"{at}.{self.router}.bias"] = (mlp.num_experts,)
        if mlp.shared:
            shapes |= mlp_tensors(f"{at}.{self.shared}", H, mlp.shared.inner)
            if mlp.shared.gated:
                shapes[f"{at}.{self.shared_gate}.weight"] = (1, H)
        return shapes

    def build(
        self,
        spec: ModelSpec,
        weights: MutableMapping[str, Matrix],
        ops: Ops,
        dtype: torch.dtype,
    ) -> Decoder:
        dense = DenseWeights(weights, ops, dtype, spec.norm_eps, self.norm_offset)
        ropes = {attention.rope for attention in spec.attention_layers if attention.rope}
        rotaries = {rope: Rotary(rope, dense.device) for rope in ropes}
        layers = []
        for index, layer in enumerate(spec.layers):
            at = self.at(index)
            rope = layer.mixer.rope if isinstance(layer.mixer, AttentionSpec) else None
            mixer = self.build_mixer(dense, spec, index, rotaries[rope] if rope else None)
            mlp = self.build_mlp(dense, spec, index)
            layers.append(
                Layer(
                    dense.norm(f"{at}.input_layernorm"),
                    mixer,
                    dense.norm(f"{at}.post_attention_layernorm"),
                    mlp,
                )
            )
        embedding = dense.tensor(f"{self.model}.embed_tokens.weight")
        if spec.tied_head:
            head = Linear(ops, embedding, out_dtype=torch.float32)
        else:
            head = dense.linear(self.head, torch.float32)
        norm = dense.norm(f"{self.model}.norm")
        dense.finish()
        return Decoder(
            spec,
            Embedding(embedding, spec.embedding_scale),
            layers,
            norm,
            head,
        )

    def build_mixer(
        self, dense: DenseWeights, spec: ModelSpec, layer: int, rotary: Rotary | None
    ) -> Block:
        at, attention = f"{self.at(layer)}.{self.attention}", spec.layers[layer].attention
        return Attention(
            dense.ops,
            attention,
            spec.place(layer),
            qkv=dense.fused([f"{at}.{x}_proj" for x in "qkv"]),
            out=dense.linear(f"{at}.o_proj", torch.float32),
            rotary=rotary,
            q_norm=dense.norm(f"{at}.q_norm") if attention.qk_norm else None,
            k_norm=dense.norm(f"{at}.k_norm") if attention.qk_norm else None,
            sinks=dense.tensor(f"{at}.sinks").float() if attention.sinks else None,
        )

    def build_mlp(self, dense: DenseWeights, spec: ModelSpec, layer: int) -> Block:
        at, mlp = self.at(layer), spec.layers[layer].mlp
        if isinstance(mlp, DenseSpec):
            return dense_mlp(dense, f"{at}.{self.mlp}")
        shared = None
        if mlp.shared:
            gate = f"{at}.{self.shared_gate}"
            shared = SharedExpert(
                dense.ops,
                dense_mlp(dense, f"{at}.{self.shared}"),
                dense.linear(gate, torch.float32) if mlp.shared.gated else None,
            )
        router = dense.linear(f"{at}.{self.router}", torch.float32)
        return SparseMlp(mlp, layer, router, shared)

    def at(self, layer: int) -> str:
        return f"{self.model}.layers.{layer}"


def attention_tensors(at: str, hidden: int, spec: AttentionSpec) -> Shapes:
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: Shapes = {
        f"{at}.q_proj.weight": (2 * q if spec.gated else q, hidden),
        f"{at}.k_proj.weight": (kv, hidden),
        f"{at}.v_proj.weight": (kv, hidden),
        f"{at}.o_proj.weight": (hidden, q),
    }
    if spec.qk_norm:
        whole = spec.qk_norm == "width"
        shapes[f"{at}.q_norm.weight"] = (q if whole else spec.head_dim,)
        shapes[f"{at}.k_norm.weight"] = (kv if whole else spec.head_dim,)
    if spec.bias:
        shapes |= {f"{at}.{x}_proj.bias": (rows,) for x, rows in zip("qkv", (q, kv, kv))}
    if spec.out_bias:
        shapes[f"{at}.o_proj.bias"] = (hidden,)
    if spec.sinks:
        shapes[f"{at}.sinks"] = (spec.num_heads,)
    return shapes


def mlp_tensors(at: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{at}.gate_proj.weight": (inner, hidden),
        f"{at}.up_proj.weight": (inner, hidden),
        f"{at}.down_proj.weight": (hidden, inner),
    }


def dense_mlp(dense: DenseWeights, at: str) -> DenseMlp:
    return DenseMlp(
        dense.ops,
        dense.fused([f"{at}.gate_proj", f"{at}.up_proj"]),
        down=dense.linear(f"{at}.down_proj", torch.float32),
    )


def _moe(spec: ModelSpec, layer: int) -> MoeSpec:
    mlp = spec.layers[layer].mlp
    assert isinstance(mlp, MoeSpec), layer
    return mlp
