"""Tokens from logits on the device, for rows that ask for nothing but a temperature."""

from __future__ import annotations

import torch

_COLDEST, _HOTTEST = 1e-30, 1e30  # as ftd.engine.sampling: beyond them float32 overflows


def draw(
    logits: torch.Tensor,  # [R, V] float32
    temperature: torch.Tensor,  # [R] float32, 0: greedy
    uniform: torch.Tensor,  # [R] float64 in (0, 1)
) -> tuple[torch.Tensor, torch.Tensor]:  # [R] int64; [R] bool, the row is finite
    """The draw of ``ftd.engine.sampling``: one number picks in the order of the vocabulary.

    Launches only, no wait: fit for a captured graph.
    """
    best, greedy = logits.max(dim=1, keepdim=True)
    finite = logits.sum(dim=1).isfinite()
    scaled = (logits - best) / temperature.clamp(_COLDEST, _HOTTEST)[:, None]
    mass = scaled.exp().cumsum(1, dtype=torch.float64)
    picked = torch.searchsorted(mass, mass[:, -1:] * uniform[:, None], right=True)
    picked = picked.clamp(max=logits.shape[1] - 1)
    return torch.where(temperature[:, None] == 0, greedy, picked)[:, 0], finite
