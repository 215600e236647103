"""The least time a decode step could take by bandwidth alone: counted bytes over given rates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GB = 1e9
_EXPERT = re.compile(r"\.experts\.")  # not shared_expert


@dataclass(frozen=True)
class Rates:
    """Bytes a second: the link, host memory as the CPU reads it, GPU memory."""

    link: float
    dram: float
    hbm: float

    @classmethod
    def of_gigabytes(cls, link: float, dram: float, hbm: float) -> Rates:
        return cls(link * GB, dram * GB, hbm * GB)


@dataclass(frozen=True)
class Weights:
    """What a checkpoint holds, from its headers."""

    expert_bytes: float  # of one expert
    dense_bytes: int  # read for every token: all but experts and embedding
    num_experts: int  # over all layers
    layers: int
    experts_per_token: int
    vocab: int


def read_weights(model: Path) -> Weights:
    config = json.loads((model / "config.json").read_text())
    c = config.get("text_config", config)
    layers = c["num_hidden_layers"]
    experts = layers * (c.get("num_experts") or c["num_local_experts"])
    of_experts = dense = 0
    for file in model.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            if _EXPERT.search(name):
                of_experts += end - begin
            elif "embed_tokens" not in name:
                dense += end - begin
    return Weights(
        of_experts / experts, dense, experts, layers, c["num_experts_per_tok"], c["vocab_size"]
    )


def least_step_s(weights: Weights, step: Mapping[str, float], rates: Rates) -> float:
    """Misses over host memory and link together, everything else over GPU memory. KV is left out.

    Args:
        step: what one step did on average: ``hits`` and ``misses``.
        rates: of link and memory not both 0, where something was missed.
    """
    missed = step["misses"] * weights.expert_bytes
    others = step["hits"] * weights.expert_bytes + weights.dense_bytes
    missed_s = missed / (rates.dram + rates.link) if missed else 0.0
    return missed_s + others / rates.hbm
