"""Qwen3-Next and Qwen3.5-MoE against transformers, and their recurrent state against itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from closeness import Run, check_close, closeness, expected_run, run_of
from lone_model import LoneModel, Recorder
from oracle_check import Oracle, Prompt
from safetensors.torch import load_file, save_file

from ftd.checkpoint.headers import read_checkpoint
from ftd.kernels.cpu import native
from ftd.kernels.ops import Ops
from ftd.kernels.reference import TorchOps
from ftd.model.registry import architecture_for
from ftd.text.messages import normalise
from ftd.text.textmodel import TextModel

WAYS = {
    "prefill": lambda length: [],
    "decode": lambda length: [1] * length,
    "chunks": lambda length: [5, 1, 2, 1, 19, 16, 33, 1],
}


@pytest.fixture(scope="module", params=["torch", "native"])
def ops(request) -> Iterator[Ops]:
    if request.param == "torch":
        yield TorchOps()
        return
    ops = native.load() or pytest.skip("the C++ kernels are not built")
    yield ops
    ops.close()


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_moe"])
def directory(request, data_dir) -> Path:
    return data_dir / "oracles" / request.param


@pytest.fixture(scope="module")
def oracle(directory) -> Oracle:
    return Oracle(directory)


@pytest.fixture(scope="module")
def model(directory, ops) -> LoneModel:
    return LoneModel(directory, ops)


@pytest.mark.parametrize("way", WAYS)
def test_logits_routing_and_hidden_states_match(model, oracle, way):
    assert list(model.spec.moe_layers) == oracle.moe_layers
    for prompt in oracle.prompts:
        seen = Recorder()
        logits = model.run(prompt.sequence, WAYS[way](len(prompt.sequence)), seen)
        oracle.check_logits(prompt, logits)
        for layer in oracle.moe_layers:
            oracle.check_routing(prompt, layer, *seen.routing(layer))
        for index, expected in enumerate(oracle.hidden_states(prompt) or []):
            error = (seen.state(index) - expected).abs().max()
            assert error <= 1e-3 * expected.abs().max(), (prompt.name, index, error)


def test_greedy_tokens_match(model, oracle):
    for prompt in oracle.prompts:
        assert oracle.check_greedy(prompt, model.greedy(prompt.ids, 32)) == 32


def test_chunks_slots_and_neighbours_change_no_bit(model, oracle, directory, ops):
    first, second = oracle.prompts[0].sequence, oracle.prompts[1].sequence
    expected = model.run(first)
    for way in ("decode", "chunks"):
        assert torch.equal(model.run(first, WAYS[way](len(first))), expected), way
    other = LoneModel(directory, ops, num_sequences=8, page_tokens=8)
    other.step({owner: second[: 3 + owner] for owner in range(8) if owner != 5})
    parts = [other.step({5: first[:7]})]
    for i, token in enumerate(first[7:]):
        beside = [second[i % len(second)]]
        parts.append(other.step({0: beside, 5: [token], 2: beside, 7: beside})[1:2])
    assert torch.equal(torch.cat(parts), expected)


def test_bfloat16_is_close(directory, oracle, ops):
    model = LoneModel(directory, ops, torch.bfloat16)

    def found(prompt: Prompt) -> Run:
        return run_of(model, prompt, WAYS["chunks"](len(prompt.sequence)))

    check_close(closeness(oracle.prompts, found, partial(expected_run, oracle)))


def test_chat_template_and_ids_are_those_of_the_oracle(directory, oracle):
    text, chat = TextModel(directory), oracle.info["chat"]
    assert text.render(normalise(chat["messages"])) == chat["rendered"]
    assert text.encode(chat["rendered"], special_tokens=True) == chat["ids"]


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
