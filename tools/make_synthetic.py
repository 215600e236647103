"""Write a full-width Mixture-of-Experts checkpoint with random weights and *skewed* routing.

    python tools/make_synthetic.py /dev/shm/synthetic --layers 16
    python tools/make_synthetic.py /dev/shm/synthetic --format nvfp4

Real checkpoints cannot always be had where speed is measured. Random routers, however, spread
tokens evenly over the experts, which no trained model does, so an expert cache measured on them
looks far worse than it is. The layer shapes here are the published ones, and the routers have an
adjustable popularity skew:

- every token embedding shares one constant direction ``c`` (half of its energy);
- router row ``e`` holds ``skew * g_e`` along ``c`` (``g_e`` standard normal, drawn per layer) plus
  isotropic noise, so the logit of expert ``e`` is ``skew * g_e + N(0, 1)`` for a random token.

With ``--skew 1.0`` an LRU that holds 37 % of all experts misses about 15 % of its reads at decode,
as published for a trained 35B model; ``--skew 0`` is uniform routing. Sample with temperature 1:
greedy decoding of random weights falls into loops and flatters any cache.

``--format`` stores the experts, and what else is published so, in another format than bf16.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

from synthetic_formats import DENSE_TOO, FORMATS, Source

SMALL = 0.15  # layer outputs stay small, so that the shared direction survives the layers

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    experts: int
    experts_per_token: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


PRESETS = {
    "qwen3-30b-a3b": Shape(2048, 48, 128, 8, 768, 32, 4, 128, 151936),
    "qwen3-35b-shape": Shape(2048, 40, 256, 8, 512, 16, 2, 256, 151936),
    "tiny": Shape(128, 4, 16, 2, 64, 4, 2, 32, 512),
}


class Writer:
    """Draws tensors and saves them shard by shard."""

    def __init__(self, out: Path, shape: Shape, skew: float, source: Source, fmt: str) -> None:
        self.out, self.shape, self.skew, self.format = out, shape, skew, fmt
        self.source = source
        self.normal, self.wide = source.normal, source.wide
        self.num_shards = shape.layers + 1
        self.index: dict[str, str] = {}
        self.total_bytes = 0

    def ones(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    def linear(
        self, module: str, rows: int, columns: int, std: float, fmt: str
    ) -> dict[str, torch.Tensor]:
        stored = FORMATS[fmt](self.source, rows, columns, std)
        return {f"{module}.{suffix}": tensor for suffix, tensor in stored}

    def save(self, number: int, tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{number:05d}-of-{self.num_shards:05d}.safetensors"
        on_cpu = {k: t.cpu().contiguous() for k, t in tensors.items()}
        save_file(on_cpu, self.out / name, metadata={"format": "pt"})
        self.index |= dict.fromkeys(on_cpu, name)
        self.total_bytes += sum(t.nbytes for t in on_cpu.values())

    def write(self) -> None:
        s = self.shape
        common = self.wide(s.hidden)
        common /= common.norm()
        share = math.sqrt(0.5)  # half of the energy of an embedding lies along ``common``
        embedding = self.normal(s.vocab, s.hidden, std=share)
        embedding += (common * math.sqrt(s.hidden) * share).bfloat16()
        self.save(
            1,
            {
                "model.embed_tokens.weight": embedding,
                "model.norm.weight": self.ones(s.hidden),
                "lm_head.weight": self.normal(s.vocab, s.hidden, std=1 / math.sqrt(s.hidden)),
            },
        )
        for layer in range(s.layers):
            self.save(layer + 2, self.layer(f"model.layers.{layer}.", common, share))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": self.index}
        (self.out / "model.safetensors.index.json").write_text(json.dumps(index))

    def layer(self, at: str, common: torch.Tensor, share: float) -> dict[str, torch.Tensor]:
        s = self.shape
        std, q = 1 / math.sqrt(s.hidden), s.heads * s.head_dim
        perpendicular = math.sqrt(s.hidden) * share  # length of a token's own part after the norm
        popularity = self.wide(s.experts, 1)
        router = self.wide(s.experts, s.hidden) / perpendicular
        router -= (router @ common)[:, None] * common
        router += self.skew * popularity * common / perpendicular
        tensors = {
            "input_layernorm.weight": self.ones(s.hidden),
            "post_attention_layernorm.weight": self.ones(s.hidden),
            "self_attn.q_norm.weight": self.ones(s.head_dim),
            "self_attn.k_norm.weight": self.ones(s.head_dim),
            "mlp.gate.weight": router.bfloat16(),
        }
        dense, kv = self.format if self.format in DENSE_TOO else "bf16", s.kv_heads * s.head_dim
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            tensors |= self.linear(f"self_attn.{name}_proj", rows, s.hidden, std, dense)
        tensors |= self.linear("self_attn.o_proj", s.hidden, q, SMALL / math.sqrt(q), dense)
        for expert in range(s.experts):
            e = f"mlp.experts.{expert}"
            for name in ("gate_proj", "up_proj"):
                tensors |= self.linear(f"{e}.{name}", s.inner, s.hidden, std, self.format)
            down_std = SMALL / math.sqrt(s.inner)
            tensors |= self.linear(f"{e}.down_proj", s.hidden, s.inner, down_std, self.format)
        return {at + name: tensor for name, tensor in tensors.items()}


def config(s: Shape) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_experts": s.experts,
        "num_experts_per_tok": s.experts_per_token,
        "moe_intermediate_size": s.inner,
        "intermediate_size": 3 * s.hidden,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocab,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "router_aux_loss_coef": 0.001,
        "bos_token_id": s.vocab - 3,
        "eos_token_id": s.vocab - 1,
    }


def write_tokenizer(out: Path, vocab_size: int) -> None:
    """Byte-level BPE without merges, padded with filler tokens so that every id decodes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    vocab |= {f"w{i}": i for i in range(len(vocab), vocab_size - 3)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 40960,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def make(
    out: Path,
    preset: str = "qwen3-30b-a3b",
    layers: int | None = None,
    skew: float = 1.0,
    seed: int = 0,
    device: str | None = None,
    fmt: str = "bf16",
) -> Shape:
    """Write the checkpoint into folder ``out``; returns its shape."""
    shape = PRESETS[preset]
    shape = replace(shape, layers=layers or shape.layers)
    out.mkdir(parents=True, exist_ok=True)
    source = Source(seed, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    Writer(out, shape, skew, source, fmt).write()
    (out / "config.json").write_text(json.dumps(config(shape), indent=1))
    generation = {"do_sample": True, "temperature": 1.0, "eos_token_id": [shape.vocab - 1]}
    (out / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(out, shape.vocab)
    return shape


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="fewer than published, to fit the disk")
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--skew", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    options = parser.parse_args()
    shape = make(
        options.out,
        options.preset,
        options.layers,
        options.skew,
        options.seed,
        options.device,
        options.format,
    )
    print(f"{options.out}: {asdict(shape)}")


if __name__ == "__main__":
    main()
