"""Builds the checkpoints of ``tests/data/oracles`` with the oracle generator (needs transformers).

    python tests/oracles/build_fixtures.py GENERATOR_FOLDER

GENERATOR_FOLDER holds ``make_tiny.py``. Every fixture exercises one way a Qwen3-MoE config can
differ; all but the first are cut to fewer layers and prompts, to keep the repository small.
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


def shrink(directory: Path) -> None:
    """Forget the expectations of all prompts but ``KEPT_PROMPTS``."""
    path = directory / "expected.json"
    info = json.loads(path.read_text())
    info["prompts"] = [p for p in info["prompts"] if p["name"] in KEPT_PROMPTS]
    path.write_text(json.dumps(info, indent=2, ensure_ascii=False) + "\n")
    tensors = load_file(directory / "expected.safetensors")
    kept = {k: v for k, v in tensors.items() if k.split(".")[0] in KEPT_PROMPTS}
    save_file(kept, directory / "expected.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("generator", type=Path, help="the folder of make_tiny.py")
    sys.path.insert(0, str(parser.parse_args().generator))
    import make_tiny
    import tiny_archs
    import torch

    torch.set_num_threads(1)
    plain = tiny_archs.ARCHS["qwen3_moe"]
    # a tied head repeats its input unless the layers speak louder than the embedding
    tied = dataclasses.replace(plain, gains=tiny_archs._TIED_GAINS)
    for seed, (name, overrides) in enumerate(FIXTURES.items(), start=1):
        tiny_archs.ARCHS["qwen3_moe"] = tied if overrides.get("tie_word_embeddings") else plain
        assignments = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
        with tempfile.TemporaryDirectory() as scratch:
            summary = make_tiny.build("qwen3_moe", seed, Path(scratch), "none", assignments)
            built = Path(summary["directory"])
            if overrides:
                shrink(built)
            for file in built.iterdir():
                file.chmod(0o644)
            shutil.rmtree(OUT / name, ignore_errors=True)
            shutil.copytree(built, OUT / name)
        print(name, summary["stats"])


if __name__ == "__main__":
    main()
