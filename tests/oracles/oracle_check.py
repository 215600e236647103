"""Compare an engine with the expectations of a tiny oracle checkpoint.

Needs torch and safetensors only. Typical use in a test::

    oracle = Oracle(directory)
    for prompt in oracle.prompts:
        logits = engine.logits(prompt.sequence)          # [T, vocab] float32
        oracle.check_logits(prompt, logits)
        oracle.check_greedy(prompt, engine.generate(prompt.ids, 32))

Every check raises :class:`OracleMismatch` with the first difference it finds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

# Largest absolute logit error of a float32 engine (logits have a standard
# deviation of about 4). bfloat16 engines need a tolerance of their own.
FLOAT32_LOGIT_TOLERANCE = 2e-3
# Weights of the chosen experts, float32.
FLOAT32_ROUTER_TOLERANCE = 1e-4


class OracleMismatch(AssertionError):
    """The engine disagrees with the oracle by more than the tolerance."""


@dataclass(frozen=True)
class Prompt:
    """One prompt and what the oracle continued it with."""

    name: str
    ids: list[int]
    greedy: list[int]
    margins: list[float]
    logits_start: int

    @property
    def sequence(self) -> list[int]:
        """Prompt plus continuation without its last token: the oracle's input."""
        return self.ids + self.greedy[:-1]


class Oracle:
    """Expectations of one checkpoint directory."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.info = json.loads((self.directory / "expected.json").read_text())
        self.tensors = load_file(self.directory / "expected.safetensors")
        self.prompts = [Prompt(**record) for record in self.info["prompts"]]

    @property
    def moe_layers(self) -> list[int]:
        return self.info["stats"]["moe_layers"]

    def logits(self, prompt: Prompt) -> torch.Tensor:
        """Expected logits of the rows ``prompt.logits_start ..`` of ``prompt.sequence``."""
        return self.tensors[f"{prompt.name}.logits"]

    def routing(self, prompt: Prompt, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids (ascending) and their weights for every row of the sequence."""
        key = f"{prompt.name}.router.{layer}"
        return self.tensors[key + ".ids"], self.tensors[key + ".weights"]

    def hidden_states(self, prompt: Prompt) -> list[torch.Tensor] | None:
        """Residual stream before each layer and after the last, where stored."""
        found = []
        while (value := self.tensors.get(f"{prompt.name}.hidden.{len(found)}")) is not None:
            found.append(value)
        return found or None

    def check_logits(
        self, prompt: Prompt, logits: torch.Tensor, tolerance: float = FLOAT32_LOGIT_TOLERANCE
    ) -> float:
        """Check logits for the whole of ``prompt.sequence``; return the largest error."""
        rows = logits.float().cpu()[prompt.logits_start : len(prompt.sequence)]
        expected = self.logits(prompt)
        if rows.shape != expected.shape:
            raise OracleMismatch(
                f"{prompt.name}: logits {tuple(rows.shape)}, expected {tuple(expected.shape)}"
            )
        error = (rows - expected).abs().amax(dim=-1)
        worst = error.max().item()
        if not worst <= tolerance:  # also catches NaN
            row = int((~(error <= tolerance)).nonzero()[0])
            raise OracleMismatch(
                f"{prompt.name}: logit error {worst:.3g} > {tolerance:g}; "
                f"first bad position {row + prompt.logits_start} of {len(prompt.sequence)}"
            )
        return worst

    def check_greedy(
        self, prompt: Prompt, tokens: list[int], tolerance: float = FLOAT32_LOGIT_TOLERANCE
    ) -> int:
        """Check a greedy continuation; return how many tokens were compared.

        A different token is an error only where the oracle's margin between its
        best two tokens exceeds twice the tolerance; at a closer call the engine
        may legitimately take the other branch and the comparison ends there.
        """
        for step, (token, expected) in enumerate(zip(tokens, prompt.greedy, strict=False)):
            if token == expected:
                continue
            if prompt.margins[step] > 2 * tolerance:
                raise OracleMismatch(
                    f"{prompt.name}: step {step} gave {token}, expected {expected} "
                    f"(margin {prompt.margins[step]:.4f})"
                )
            return step
        return min(len(tokens), len(prompt.greedy))

    def check_routing(
        self,
        prompt: Prompt,
        layer: int,
        ids: torch.Tensor,
        weights: torch.Tensor,
        tolerance: float = FLOAT32_ROUTER_TOLERANCE,
    ) -> None:
        """Check the chosen experts of one layer, in any order within a row."""
        expected_ids, expected_weights = self.routing(prompt, layer)
        order = ids.cpu().long().argsort(dim=-1)
        ids = ids.cpu().long().gather(-1, order)
        weights = weights.float().cpu().gather(-1, order)
        wrong = (ids != expected_ids.long()).any(dim=-1)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise OracleMismatch(
                f"{prompt.name}: layer {layer} position {row} chose {ids[row].tolist()}, "
                f"expected {expected_ids[row].tolist()}"
            )
        worst = (weights - expected_weights).abs().max().item()
        if not worst <= tolerance:
            raise OracleMismatch(
                f"{prompt.name}: layer {layer} router weight error {worst:.3g} > {tolerance:g}"
            )
