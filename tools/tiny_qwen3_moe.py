"""A small Qwen3-MoE to train: its shape, its forward pass, and its published checkpoint layout.

Both trainers use it.
Source of the arithmetic: transformers' modeling_qwen3_moe.py.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

TEMPLATE = (Path(__file__).parent / "chatml.jinja").read_text()
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    inner: int
    context: int
    rope_theta: float
    window: int | None = None  # every layer: a query at p sees keys p - window + 1 .. p

    def config(self, eos: int, bos: int) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "torch_dtype": "bfloat16",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.inner,
            "intermediate_size": 3 * self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "hidden_act": "silu",
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "rms_norm_eps": NORM_EPS,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "use_sliding_window": self.window is not None,
            **({"sliding_window": self.window} if self.window else {}),
            "eos_token_id": eos,
            "bos_token_id": bos,
        }

    @staticmethod
    def from_config(config: dict[str, Any]) -> Shape:
        return Shape(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            experts=config["num_experts"],
            top_k=config["num_experts_per_tok"],
            inner=config["moe_intermediate_size"],
            context=config["max_position_embeddings"],
            rope_theta=config["rope_theta"],
            window=config["sliding_window"] if config["use_sliding_window"] else None,
        )


class Norm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), NORM_EPS).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention, each query seeing at most ``window`` keys; blocks of queries past it."""
    T = q.shape[2]
    if window is None or window >= T:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    first = (x[:, :, :window] for x in (q, k, v))
    blocks = [F.scaled_dot_product_attention(*first, is_causal=True)]
    for start in range(window, T, window):
        # from a multiple of 8, as the masked kernels want their masks aligned
        end, low = min(T, start + window), (start - window + 1) // 8 * 8
        query = torch.arange(start, end, device=q.device)[:, None]
        key = torch.arange(low, end, device=q.device)
        seen = (key <= query) & (key > query - window)
        part = q[:, :, start:end], k[:, :, low:end], v[:, :, low:end]
        blocks.append(F.scaled_dot_product_attention(*part, attn_mask=seen))
    return torch.cat(blocks, 2)


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        H, D, E, inner = shape.hidden, shape.head_dim, shape.experts, shape.inner
        self.input_norm, self.post_norm = Norm(H), Norm(H)
        self.q_norm, self.k_norm = Norm(D), Norm(D)
        self.q = nn.Linear(H, shape.heads * D, bias=False)
        self.k = nn.Linear(H, shape.kv_heads * D, bias=False)
        self.v = nn.Linear(H, shape.kv_heads * D, bias=False)
        self.o = nn.Linear(shape.heads * D, H, bias=False)
        self.router = nn.Linear(H, E, bias=False)
        self.gate = nn.Linear(H, E * inner, bias=False)
        self.up = nn.Linear(H, E * inner, bias=False)
        self.down = nn.Linear(E * inner, H, bias=False)
        for name, module in self.named_children():
            if isinstance(module, nn.Linear):
                into_stream = name in ("o", "down")
                std = 0.02 / math.sqrt(2 * shape.layers) if into_stream else 0.02
                nn.init.normal_(module.weight, 0, std)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        s = self.shape
        q = self.q_norm(self.q(x).view(B, T, s.heads, s.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(B, T, s.kv_heads, s.head_dim)).transpose(1, 2)
        v = self.v(x).view(B, T, s.kv_heads, s.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        y = attend(q, k, v, s.window)
        return self.o(y.transpose(1, 2).reshape(B, T, -1))

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts' sum, and the load-balance loss: 1 when every expert gets its share."""
        s = self.shape
        prob = F.linear(x.float(), self.router.weight.float()).softmax(-1)  # [B, T, E]
        weight, chosen = prob.topk(s.top_k, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        load = torch.zeros_like(prob).scatter(-1, chosen, 1.0).mean((0, 1))
        balance = s.experts / s.top_k * (load * prob.mean((0, 1))).sum()
        gates = torch.zeros_like(prob).scatter(-1, chosen, weight).to(x.dtype)
        return (self.all_experts if x.is_cuda else self.chosen_experts)(x, gates), balance

    def all_experts(self, x: Tensor, gates: Tensor) -> Tensor:
        """Every expert for every token, zero where not chosen: one dense product, for a GPU."""
        B, T, _ = x.shape
        inner = (F.silu(self.gate(x)) * self.up(x)).view(B, T, *gates.shape[2:], self.shape.inner)
        return self.down((inner * gates[..., None]).reshape(B, T, -1))

    def chosen_experts(self, x: Tensor, gates: Tensor) -> Tensor:
        """Each expert for its tokens only: a fraction of the arithmetic, in small pieces."""
        flat, gates = x.flatten(0, 1), gates.flatten(0, 1)
        out = torch.zeros_like(flat)
        for e in range(self.shape.experts):
            part = slice(e * self.shape.inner, (e + 1) * self.shape.inner)
            token = gates[:, e].nonzero()[:, 0]
            y = flat[token]
            y = F.silu(F.linear(y, self.gate.weight[part])) * F.linear(y, self.up.weight[part])
            y = F.linear(y * gates[token, e, None], self.down.weight[:, part])
            out = out.index_add(0, token, y)
        return out.view_as(x)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.input_norm(x), cos, sin)
        y, balance = self.experts(self.post_norm(x))
        return x + y, balance


class Model(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        nn.init.normal_(self.embed.weight, 0, 0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)
        half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        self.register_buffer("inv_freq", shape.rope_theta**-half, persistent=False)

    def forward(self, ids: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states [B, T, H] before the head, and the mean balance loss.

        Args:
            ids: [B, T] int64.
            first: [B] position of each row's first token; 0 when left out.
        """
        position = torch.arange(ids.shape[1], device=ids.device)[None, :]
        if first is not None:
            position = position + first[:, None]
        angle = position[..., None].float() * self.inv_freq
        angle = torch.cat((angle, angle), -1)[:, None]  # [B, 1, T, D]
        cos, sin = angle.cos(), angle.sin()
        x, balance = self.embed(ids), 0.0
        for layer in self.layers:
            x, b = layer(x, cos, sin)
            balance = balance + b
        return self.norm(x), balance / self.shape.layers

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed.weight.to(hidden.dtype))


def optimizer(model: Model, lr: float, fused: bool) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)


def published_names(model: Model) -> dict[str, Tensor]:
    """Every weight under its name in a published checkpoint: a view, so it can be loaded into."""
    names = {
        "model.embed_tokens.weight": model.embed.weight,
        "model.norm.weight": model.norm.weight,
    }
    attention = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        names[p + "input_layernorm.weight"] = layer.input_norm.weight
        names[p + "post_attention_layernorm.weight"] = layer.post_norm.weight
        names[p + "self_attn.q_norm.weight"] = layer.q_norm.weight
        names[p + "self_attn.k_norm.weight"] = layer.k_norm.weight
        for published, ours in attention.items():
            names[p + f"self_attn.{published}.weight"] = getattr(layer, ours).weight
        names[p + "mlp.gate.weight"] = layer.router.weight
        for e in range(model.shape.experts):
            part = slice(e * model.shape.inner, (e + 1) * model.shape.inner)
            q = f"{p}mlp.experts.{e}."
            names[q + "gate_proj.weight"] = layer.gate.weight[part]
            names[q + "up_proj.weight"] = layer.up.weight[part]
            names[q + "down_proj.weight"] = layer.down.weight[:, part]
    return names


def save(
    model: Model,
    out: Path,
    tokenizer: Tokenizer,
    *,
    sampling: dict[str, Any] | None = None,
    shards: int = 1,
) -> None:
    """Write the model in bfloat16 with its tokenizer; ``sampling``: defaults of generation."""
    eos, bos = (tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>"))
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: w.detach().to("cpu", torch.bfloat16).contiguous().clone()
        for name, w in published_names(model).items()
    }
    size = sum(w.numel() * 2 for w in tensors.values())
    if shards == 1:
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    else:
        place, done = {}, 0
        for name, w in tensors.items():
            place[name] = f"model-{done * shards // size + 1:05d}-of-{shards:05d}.safetensors"
            done += w.numel() * 2
        for file in sorted(set(place.values())):
            part = {name: w for name, w in tensors.items() if place[name] == file}
            save_file(part, out / file, metadata={"format": "pt"})
        index = {"metadata": {"total_size": size}, "weight_map": place}
        write_json(out / "model.safetensors.index.json", index)
    write_json(out / "config.json", model.shape.config(eos, bos))
    write_json(out / "generation_config.json", {"eos_token_id": [eos, bos], **(sampling or {})})
    (out / "tokenizer.json").write_text(tokenizer.to_str())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": model.shape.context,
        "chat_template": TEMPLATE,
    }
    write_json(out / "tokenizer_config.json", settings)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def load(path: Path) -> Model:
    model = Model(Shape.from_config(json.loads((path / "config.json").read_text())))
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    with torch.no_grad():
        for name, weight in published_names(model).items():
            weight.copy_(tensors[name])
    return model


def chat_template(source: str = TEMPLATE) -> jinja2.Template:
    """The template as transformers compiles it."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda x, **_: json.dumps(x, ensure_ascii=False)
    return environment.from_string(source)
