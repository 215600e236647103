"""Builds the checkpoints of ``tests/data/oracles`` with the oracle generator (needs transformers).

    python tests/oracles/build_fixtures.py [NAME ...]

Every fixture exercises one way a Qwen3-MoE config can
differ, or one format; all but the first are cut to fewer layers and prompts, to keep the repository
small.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

OUT = Path(__file__).resolve().parents[1] / "data" / "oracles"
KEPT_PROMPTS = ("len17", "len64", "chat")  # of the smaller fixtures; len17 has the hidden states
KEPT_FEW = ("len17", "len64")
KEPT_OF_FORMATS = ("len17",)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen3_moe-window": {
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,  # transformers pays no heed to it: every layer has the window
    },
    "qwen3_moe-tied": {
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
        "rope_scaling": YARN,
    },
    "qwen3_moe-unnormalised": {
        "num_hidden_layers": 2,
        "norm_topk_prob": False,
        "attention_bias": True,
    },
    "qwen3_moe-mixed": {"decoder_sparse_step": 2, "mlp_only_layers": [1]},  # only layer 3 is MoE
}
# format → what else is set; written as qwen3_moe-<format>
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"hidden_size": 160},  # more than one tile of 128, the last one partial
    "fp8-ct": {},
    "nvfp4": {},
    "nvfp4-ct": {},
    "int4-ct": {},
    "mxfp4-ct": {},  # published for other families only: the generator is told otherwise
}
# of the families with a delta net: two kinds of mixer, one of them twice
_SMALL = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_TWO_LAYERS = {"num_hidden_layers": 2}
_GPT_OSS = {
    **_TWO_LAYERS,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size": 96,
    "num_local_experts": 4,
}
# family, and format if it is quantised → what is set
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_hidden_layers": 3, "full_attention_interval": 2, **_SMALL},
    "qwen3_5_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **_SMALL,
    },
    # every other layer below max_window_layers has the window
    "qwen2_moe": {
        **_TWO_LAYERS,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 1,
    },
    "mixtral": {**_TWO_LAYERS, "num_local_experts": 4, "intermediate_size": 16},
    # norms of q and k differ in width
    "olmoe": {**_TWO_LAYERS, "num_key_value_heads": 2, "intermediate_size": 16},
    "granitemoe": {**_TWO_LAYERS, "num_local_experts": 4, "intermediate_size": 16},
    # layers with and without the window, a width that is no power of two
    "gpt_oss": _GPT_OSS,
    "gpt_oss-mxfp4": _GPT_OSS,
}


def shrink(directory: Path, kept_prompts: tuple[str, ...], *, few_logits: bool = False) -> None:
    """Forget the expectations of all prompts but some.

    Args:
        few_logits: keep only those that choose a token.
    """
    path = directory / "expected.json"
    info = json.loads(path.read_text())
    info["prompts"] = [p for p in info["prompts"] if p["name"] in kept_prompts]
    tensors = load_file(directory / "expected.safetensors")
    kept = {k: v for k, v in tensors.items() if k.split(".")[0] in kept_prompts}
    for prompt in info["prompts"] if few_logits else []:
        name, start = f"{prompt['name']}.logits", len(prompt["ids"]) - 1
        kept[name] = kept[name][start - prompt["logits_start"] :].contiguous()
        prompt["logits_start"] = start
    path.write_text(json.dumps(info, indent=2, ensure_ascii=False) + "\n")
    save_file(kept, directory / "expected.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="default: all")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent / "generator"))
    import make_tiny
    import tiny_archs
    import tiny_quant
    import torch

    torch.set_num_threads(1)
    plain = tiny_archs.ARCHS["qwen3_moe"]
    # a tied head repeats its input unless the layers speak louder than the embedding
    tied = dataclasses.replace(plain, gains=tiny_archs._TIED_GAINS)
    for quant in FORMATS:
        published = tiny_quant._FORMATS[quant]
        archs = (*published.archs, "qwen3_moe")
        tiny_quant._FORMATS[quant] = dataclasses.replace(published, archs=archs)
    wanted = [(name, "none", overrides) for name, overrides in FIXTURES.items()]
    wanted += [(f"qwen3_moe-{q}", q, {"num_hidden_layers": 2} | o) for q, o in FORMATS.items()]
    wanted += [(n, n.partition("-")[2] or "none", o) for n, o in FAMILIES.items()]
    for seed, (name, quant, overrides) in enumerate(wanted, start=1):
        if arguments.names and name not in arguments.names:
            continue
        tiny_archs.ARCHS["qwen3_moe"] = tied if overrides.get("tie_word_embeddings") else plain
        assignments = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
        with tempfile.TemporaryDirectory() as scratch:
            summary = make_tiny.build(name.split("-")[0], seed, Path(scratch), quant, assignments)
            built = Path(summary["directory"])
            if overrides:
                few = quant != "none" or name in FAMILIES
                kept = KEPT_FEW if few else KEPT_PROMPTS
                kept = KEPT_OF_FORMATS if name.startswith("qwen3_moe") and few else kept
                shrink(built, kept, few_logits=name in FAMILIES)
            for file in built.iterdir():
                file.chmod(0o644)
            shutil.rmtree(OUT / name, ignore_errors=True)
            shutil.copytree(built, OUT / name)
        print(name, summary["stats"])


if __name__ == "__main__":
    main()
