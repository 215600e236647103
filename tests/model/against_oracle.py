"""A model against its oracle in float32, and in bfloat16: the tolerances of the oracle's README."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from lone_model import LoneModel, Recorder
from oracle_check import Oracle, OracleMismatch, Prompt

HIDDEN = 1e-3  # in float32, of the largest number of a state
LOGIT = 0.25  # judged by the median; transformers itself in bfloat16: 0.14 to 0.27
ROUTER_WEIGHT = 2e-2
DISAGREED = 0.02  # of the rows that were the same so far, and of clear choices of a token
FEW = 2  # such cases are no share yet: some oracles have 48 rows
CLEAR = 0.5  # a margin of the best two tokens


def check_prompt(
    oracle: Oracle, prompt: Prompt, model: LoneModel, chunks: Sequence[int]
) -> torch.Tensor:
    """Logits [T, V] of a float32 model: they, the routing and the states are the oracle's.

    Raises:
        OracleMismatch: the first difference that is too large.
    """
    seen = Recorder()
    logits = model.run(prompt.sequence, chunks, seen)
    oracle.check_logits(prompt, logits)
    for layer in oracle.moe_layers:
        oracle.check_routing(prompt, layer, *seen.routing(layer))
    for index, expected in enumerate(oracle.hidden_states(prompt) or []):
        error = (seen.state(index).cpu() - expected).abs().max() / expected.abs().max()
        if not error <= HIDDEN:
            raise OracleMismatch(f"{prompt.name}: hidden state {index} is off by {error:.3g}")
    return logits


@dataclass(frozen=True)
class Run:
    """``logits``: [T, V] float32, of rows ``begin`` to T alone; ``routing``: ids ascending."""

    logits: torch.Tensor
    routing: dict[int, tuple[torch.Tensor, torch.Tensor]]
    begin: int = 0


@dataclass(frozen=True)
class Closeness:
    """Of rows whose experts are the same in every layer.

    A row looks back at all before it, so one other choice moves the logits of those behind it.
    """

    logit_error: float  # the median of each row's largest
    mean_error: float  # the mean of the same
    undisturbed_error: float  # the same of rows before any other choice, if a run knows such rows
    weight_error: float  # the mean
    disagreed: int  # routers that chose otherwise
    looks: int  # at a row of a layer that was the same up to there
    other_tokens: int  # greedy, where the choice is clear
    clear_tokens: int


def expected_run(oracle: Oracle, prompt: Prompt) -> Run:
    """As transformers computed it."""
    routing = {layer: oracle.routing(prompt, layer) for layer in oracle.moe_layers}
    return Run(oracle.logits(prompt), routing, prompt.logits_start)


def run_of(model: LoneModel, prompt: Prompt, chunks: Sequence[int]) -> Run:
    seen = Recorder()
    logits = model.run(prompt.sequence, chunks, seen).float().cpu()
    routing = {}
    for layer in model.spec.moe_layers:
        ids, weights = seen.routing(layer)
        ids, order = ids.cpu().long().sort(-1)
        routing[layer] = ids, weights.float().cpu().gather(-1, order)
    return Run(logits, routing)


def closeness(
    prompts: Iterable[Prompt],
    found: Callable[[Prompt], Run],
    expected: Callable[[Prompt], Run],
) -> Closeness:
    """A close call of a router may go the other way; from there on a row differs as it may."""
    looks = disagreed = other_tokens = compared = 0
    errors, undisturbed, weight_errors = [], [], []
    for prompt in prompts:
        ours, theirs = found(prompt), expected(prompt)
        agrees = torch.ones(len(prompt.sequence), dtype=torch.bool)
        for layer, (ids, weights) in ours.routing.items():
            same = (ids == theirs.routing[layer][0]).all(-1)
            looks += int(agrees.sum())
            disagreed += int((agrees & ~same).sum())
            agrees &= same
            weight_errors.append((weights - theirs.routing[layer][1]).abs()[agrees].flatten())
        begin = max(ours.begin, theirs.begin)
        difference = ours.logits[begin - ours.begin :] - theirs.logits[begin - theirs.begin :]
        error = difference.abs().amax(-1)
        errors.append(error[agrees[begin:]])
        undisturbed.append(error[agrees.cumprod(0).bool()[begin:]])
        step = slice(len(prompt.ids) - 1, None)  # rows that decide a token
        clear = agrees[step] & (torch.tensor(prompt.margins) > CLEAR)
        other = ours.logits[step].argmax(-1) != torch.tensor(prompt.greedy)
        other_tokens += int((clear & other).sum())
        compared += int(clear.sum())
    agreeing, before = torch.cat(errors), torch.cat(undisturbed)
    return Closeness(
        float(agreeing.median()),
        float(agreeing.mean()),
        float((before if len(before) else agreeing).median()),
        float(torch.cat(weight_errors).mean()),
        disagreed,
        looks,
        other_tokens,
        compared,
    )


def check_close(found: Closeness, other_tokens: int = 0) -> None:
    """Of kernels that round where the oracle's own torch would."""
    assert found.disagreed < DISAGREED * found.looks, found
    assert found.weight_error < ROUTER_WEIGHT, found
    assert found.logit_error < LOGIT, found
    assert found.other_tokens <= other_tokens, found


def check_close_on_gpu(found: Closeness) -> None:
    """Of sums in another order, in which a close call of a router may go either way."""
    assert found.disagreed <= FEW + DISAGREED * found.looks, found
    assert found.weight_error < ROUTER_WEIGHT, found
    assert found.undisturbed_error < LOGIT, found
    assert found.other_tokens <= FEW + DISAGREED * found.clear_tokens, found
