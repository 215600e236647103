"""How Qwen3-Next and Qwen3.5-MoE may be spelled: what is not read, and names of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from lone_model import LoneModel
from oracle_check import Oracle
from safetensors.torch import load_file, save_file

from ftd.checkpoint.headers import read_checkpoint
from ftd.kernels.reference import TorchOps
from ftd.model.registry import architecture_for


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_moe"])
def directory(request, data_dir) -> Path:
    return data_dir / "oracles" / request.param


@pytest.fixture(scope="module")
def oracle(directory) -> Oracle:
    return Oracle(directory)


def test_what_text_does_without_is_not_read(directory, oracle, tmp_path):
    """The vision tower and the blocks that predict more tokens: their bytes may be anything."""
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    checkpoint = read_checkpoint(copy)
    architecture = architecture_for(checkpoint.config)
    ignored = oracle.info["ignored_tensors"]
    assert ignored and all(architecture.ignored(name) for name in ignored)
    for tensor in (checkpoint.tensors[name] for name in ignored):
        with tensor.file.open("r+b") as file:
            file.seek(tensor.begin)
            file.write(b"\xff" * tensor.nbytes)  # NaN
    prompt = oracle.prompts[0]
    oracle.check_logits(prompt, LoneModel(copy, TorchOps()).run(prompt.sequence))


@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "apart"])
def test_the_text_model_of_qwen3_5_by_itself(data_dir, tmp_path, apart):
    """With names of its own; and with a matrix for each expert, as fine-tunes may have it."""
    directory = data_dir / "oracles" / "qwen3_5_moe"
    config = json.loads((directory / "config.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(directory / "tokenizer.json", tmp_path)
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("model*.safetensors"):
        tensors |= load_file(file)
    prefix = "model.language_model."
    named = {f"model.{n.removeprefix(prefix)}": t for n, t in tensors.items() if prefix in n}
    for name in [n for n in named if apart and ".experts." in n]:
        at, kind = name.rsplit(".", 1)
        for expert, matrix in enumerate(named.pop(name)):
            gate_up = matrix.chunk(2) if kind == "gate_up_proj" else ()
            parts = zip(("gate_proj", "up_proj"), gate_up) if gate_up else [("down_proj", matrix)]
            for part, values in parts:
                named[f"{at}.{expert}.{part}.weight"] = values.clone()
    save_file(named | {"lm_head.weight": tensors["lm_head.weight"]}, tmp_path / "model.safetensors")
    oracle = Oracle(directory)
    prompt = oracle.prompts[0]
    oracle.check_logits(prompt, LoneModel(tmp_path, TorchOps()).run(prompt.sequence))
