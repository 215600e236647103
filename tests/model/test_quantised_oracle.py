"""Every format that ftd reads against transformers, which computes from the decoded weights."""

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

FORMATS = ["fp8", "fp8-ct", "nvfp4", "nvfp4-ct", "int4-ct", "mxfp4-ct"]
WAYS = {"prefill": [], "decode": [1] * 64, "chunks": [5, 1, 19, 16, 2]}


@pytest.fixture(scope="module")
def ops() -> Iterator[Ops]:
    ops = native.load() or pytest.skip("the C++ kernels are not built")
    yield ops
    ops.close()


@pytest.fixture(scope="module", params=FORMATS)
def directory(request, data_dir) -> Path:
    return data_dir / "oracles" / f"qwen3_moe-{request.param}"


@pytest.fixture(scope="module")
def oracle(directory) -> Oracle:
    return Oracle(directory)


@pytest.fixture(scope="module")
def model(directory, ops) -> LoneModel:
    return LoneModel(directory, ops)


@pytest.mark.parametrize("way", WAYS)
def test_logits_routing_and_hidden_states_match(model, oracle, way):
    for prompt in oracle.prompts:
        seen = Recorder()
        logits = model.run(prompt.sequence, WAYS[way], seen)
        oracle.check_logits(prompt, logits)
        for layer in oracle.moe_layers:
            oracle.check_routing(prompt, layer, *seen.routing(layer))
        for index, expected in enumerate(oracle.hidden_states(prompt) or []):
            error = (seen.state(index) - expected).abs().max()
            assert error <= 1e-3 * expected.abs().max(), (prompt.name, index, error)


def test_torch_computes_the_same(directory, oracle):
    """Once for each format: its kernels' own tests and tools/check_models.py do the rest."""
    prompt = oracle.prompts[0]
    oracle.check_logits(prompt, LoneModel(directory, TorchOps()).run(prompt.sequence, [7]))


def test_greedy_tokens_match(model, oracle):
    for prompt in oracle.prompts:
        assert oracle.check_greedy(prompt, model.greedy(prompt.ids, 32)) == 32


def test_chunks_and_neighbours_change_no_bit(model, oracle, directory, ops):
    sequence = oracle.prompts[0].sequence
    expected = model.run(sequence)
    for way in ("decode", "chunks"):
        assert torch.equal(model.run(sequence, WAYS[way]), expected), way
    other = LoneModel(directory, ops, num_sequences=8, page_tokens=8)
    beside = {owner: sequence[owner : owner + 2] for owner in range(8) if owner != 5}
    found = [other.step({**beside, 5: [token]})[-1:] for token in sequence]
    assert torch.equal(torch.cat(found), expected)


def test_bfloat16_is_close(directory, oracle, ops):
    model = LoneModel(directory, ops, torch.bfloat16)

    def found(prompt: Prompt) -> Run:
        return run_of(model, prompt, WAYS["chunks"])

    check_close(closeness(oracle.prompts, found, partial(expected_run, oracle)))
