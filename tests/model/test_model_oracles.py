"""Families against transformers: logits, greedy tokens, routing, hidden states of tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from closeness import Run, check_close, closeness, expected_run, run_of
from lone_model import LoneModel, Recorder
from oracle_check import Oracle, Prompt

from ftd.kernels.cpu import native
from ftd.kernels.ops import Ops
from ftd.kernels.reference import TorchOps
from ftd.text.messages import normalise
from ftd.text.textmodel import TextModel

FIXTURES = [
    "qwen3_moe",
    "qwen3_moe-window",
    "qwen3_moe-tied",
    "qwen3_moe-unnormalised",
    "qwen3_moe-mixed",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "granitemoe",
    "gpt_oss",
    "gpt_oss-mxfp4",
]
WAYS = {
    "prefill": lambda length: [],
    "decode": lambda length: [1] * length,
    "chunks": lambda length: [5, 1, 19, 16, 2, 33, 1],
}


@pytest.fixture(scope="module", params=["torch", "native"])
def ops(request) -> Iterator[Ops]:
    if request.param == "torch":
        yield TorchOps()
        return
    ops = native.load() or pytest.skip("the C++ kernels are not built")
    yield ops
    ops.close()


@pytest.fixture(scope="module", params=FIXTURES)
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


def test_chat_template_and_ids_are_those_of_the_oracle(oracle, directory):
    text, chat = TextModel(directory), oracle.info["chat"]
    assert text.render(normalise(chat["messages"])) == chat["rendered"]
    assert text.encode(chat["rendered"], special_tokens=True) == chat["ids"]


def test_greedy_tokens_match(model, oracle):
    for prompt in oracle.prompts:
        assert oracle.check_greedy(prompt, model.greedy(prompt.ids, 32)) == 32


def test_chunks_pages_and_neighbours_change_no_bit(model, oracle, directory, ops):
    """The numerics contract in float32, on the path from embedding to logits."""
    first, second = oracle.prompts[-2].sequence, oracle.prompts[-1].sequence
    expected = model.run(first)
    for way in ("decode", "chunks"):
        assert torch.equal(model.run(first, WAYS[way](len(first))), expected), way
    other = LoneModel(directory, ops, num_sequences=8, page_tokens=8)
    rows = {owner: second[: 3 + owner] for owner in range(8) if owner != 5}
    other.step(rows)  # neighbours hold pages of their own
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
