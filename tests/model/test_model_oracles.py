"""Families and formats against transformers: logits, greedy tokens, routing, hidden states.

Quantised ones are compared with what transformers computes from the decoded weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from against_oracle import LOGIT, Run, check_close, check_prompt, closeness, expected_run, run_of
from lone_model import LoneModel
from oracle_check import Oracle, Prompt

from ftd.kernels.cpu import native
from ftd.kernels.ops import Ops
from ftd.kernels.reference import TorchOps
from ftd.text.messages import normalise
from ftd.text.textmodel import TextModel

FAMILIES = [
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
    "qwen3_next",
    "qwen3_5_moe",
]
FORMATS = ["fp8", "fp8-ct", "nvfp4", "nvfp4-ct", "int4-ct", "mxfp4-ct"]
# torch on a format: once (below), its kernels' own tests and tools/check_models.py do the rest
WITH = dict.fromkeys(FAMILIES, ("torch", "native"))
WITH |= {f"qwen3_moe-{name}": ("native",) for name in FORMATS}
WAYS = {
    "prefill": lambda length: [],
    "decode": lambda length: [1] * length,
    "chunks": lambda length: [5, 1, 2, 1, 19, 16, 33, 1],
}


@pytest.fixture(
    scope="module",
    params=[(name, ops) for name, all_ops in WITH.items() for ops in all_ops],
    ids="-".join,
)
def case(request) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module")
def directory(case, data_dir) -> Path:
    return data_dir / "oracles" / case[0]


@pytest.fixture(scope="module")
def ops(case) -> Iterator[Ops]:
    if case[1] == "torch":
        yield TorchOps()
        return
    ops = native.load() or pytest.skip("the C++ kernels are not built")
    yield ops
    ops.close()


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
        check_prompt(oracle, prompt, model, WAYS[way](len(prompt.sequence)))


def test_chat_template_and_ids_are_those_of_the_oracle(oracle, directory):
    text, chat = TextModel(directory), oracle.info["chat"]
    assert text.render(normalise(chat["messages"])) == chat["rendered"]
    assert text.encode(chat["rendered"], special_tokens=True) == chat["ids"]


def test_greedy_tokens_match(model, oracle):
    for prompt in oracle.prompts:
        assert oracle.check_greedy(prompt, model.greedy(prompt.ids, 32)) == 32


def test_chunks_pages_states_and_neighbours_change_no_bit(model, oracle, directory, ops):
    """The numerics contract in float32, on the path from embedding to logits."""
    prompts = [oracle.prompts[0], *oracle.prompts]  # some have one alone
    first, second = (prompt.sequence for prompt in prompts[-2:])
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

    # the one of qwen3_5_moe looks back at a row in which a router chose otherwise
    others = 1 if directory.name == "qwen3_5_moe" else 0
    seen = closeness(oracle.prompts, found, partial(expected_run, oracle))
    check_close(seen, others)
    if directory.name not in FAMILIES:
        assert seen.mean_error < LOGIT, seen


@pytest.mark.parametrize("fmt", FORMATS)
def test_torch_computes_a_format(data_dir, fmt):
    directory = data_dir / "oracles" / f"qwen3_moe-{fmt}"
    oracle = Oracle(directory)
    prompt = oracle.prompts[0]
    oracle.check_logits(prompt, LoneModel(directory, TorchOps()).run(prompt.sequence, [7]))
