"""Rotary position embedding: from the published parameters to cos and sin of a step's positions.

The float32 rounding of transformers is kept on purpose (frequencies, and position times frequency):
models were trained with it, and at position 100,000 it makes a hundredth of a radian.
"""

from __future__ import annotations

import math

import torch

from ftd.kernels.ops import Ops

from .published import Published
from .spec import RopeSpec, RopeStretch

DEFAULT_THETA = 10_000.0  # of transformers, where a config says nothing
MAX_FACTOR = 10_000.0  # of context extension: far beyond any published


def read_rope(config: Published, rotary_dim: int) -> tuple[RopeSpec, int]:
    """Rope as ``rope_theta`` with ``rope_scaling``, or as ``rope_parameters``, publish it.

    Returns:
        The rope, and how many tokens its scaling was made for (0 without scaling).
    """
    scaling = config.inner("rope_scaling" if "rope_scaling" in config else "rope_parameters")
    at_top = config.number("rope_theta", DEFAULT_THETA, above=1.0)
    theta = scaling.number("rope_theta", at_top, above=1.0)
    kind_key = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.choice(kind_key, ("default", "linear", "yarn"), "default")
    if kind == "default":
        return RopeSpec(theta, rotary_dim), 0
    factor = scaling.number("factor", most=MAX_FACTOR)
    trained = config.integer("max_position_embeddings")
    trained = scaling.integer("original_max_position_embeddings", trained)
    ramp, scale = None, 1.0
    if kind == "yarn":
        ramp = _yarn_ramp(scaling, theta, rotary_dim, trained)
        scale = _yarn_scale(scaling, factor)
    spec = RopeSpec(theta, rotary_dim, stretch=RopeStretch(factor, ramp), scale=scale)
    return spec, int(factor * trained)


def frequencies(spec: RopeSpec) -> torch.Tensor:
    """Radians per token of each rotating pair: [R / 2] float32.

    Source: _compute_yarn_parameters and its like in transformers.
    """
    pairs = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32)
    length = spec.theta ** (pairs / spec.rotary_dim)  # tokens for a turn by one radian
    stretch = spec.stretch
    if stretch is None:
        return 1.0 / length
    if stretch.ramp is None:
        return 1.0 / length / stretch.factor
    low, high = stretch.ramp
    pairs = torch.arange(spec.rotary_dim // 2, dtype=torch.float32)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)  # 1: fast, 0: slow
    return 1.0 / (stretch.factor * length) * (1 - kept) + 1.0 / length * kept


def _yarn_ramp(
    scaling: Published, theta: float, rotary_dim: int, trained: int
) -> tuple[float, float]:
    """The last fast pair and the first slow one.

    "Fast" is ``beta_fast`` turns within the trained length, "slow" ``beta_slow`` turns.
    """

    def pair_that_turns(times: float) -> float:
        return rotary_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(scaling.number("beta_fast", 32.0))
    high = pair_that_turns(scaling.number("beta_slow", 1.0))
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step, without dividing by zero
    return low, high


def _yarn_scale(scaling: Published, factor: float) -> float:
    """The factor on cos and sin that makes up for attention growing flat over long contexts."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in scaling:
        return scaling.number("attention_factor")
    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return mscale(scaling.number("mscale")) / mscale(scaling.number("mscale_all_dim"))
    return mscale(1.0)


class Rotary:
    """Turns positions into cos and sin; one object serves all layers of the same rope."""

    def __init__(self, spec: RopeSpec, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self._inv_freq = frequencies(spec).to(device)  # [R / 2]

    def at(self, position: torch.Tensor, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for each row: [T, R / 2] float32."""
        return ops.turns(position, self._inv_freq, self.spec.scale)
