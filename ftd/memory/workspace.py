"""What intermediate results of one step take: pure, a part of ``ftd.memory.needs``."""

from __future__ import annotations

from ftd.kernels.blocks import most_tokens
from ftd.kernels.formats import ExpertLayout
from ftd.model.spec import AttentionSpec, DeltaSpec, DenseSpec, ModelSpec, MoeSpec


def workspace_bytes(
    spec: ModelSpec, layout: ExpertLayout, *, rows: int, sampled: int, on_gpu: bool
) -> int:
    """The most that intermediate results of one step take: an upper estimate in float32.

    ``rows`` tokens go through a layer together, ``sampled`` of them up to the logits.
    """
    widest = 0
    for layer in spec.layers:
        mlp = _mlp_width(layer.mlp, spec.hidden, on_gpu)
        widest = max(widest, _mixer_width(layer.mixer, on_gpu), mlp)
    # residual, its norm, and a layer's result stay while the widest part is computed
    layers = rows * (4 * spec.hidden + widest) * 4
    logits = sampled * spec.vocab * 4 * 3  # as computed, with penalties, as probabilities
    upcast = 3 * layout.hidden * layout.inner * 4  # the torch path widens one expert at a time
    return layers + logits + (_routes_bytes(spec, rows) if on_gpu else upcast)


def _routes_bytes(spec: ModelSpec, rows: int) -> int:
    """On a GPU: each route's result and the hidden numbers of its expert, of a block of rows."""
    most = 0
    for layer in spec.layers:
        if isinstance(mlp := layer.mlp, MoeSpec):
            block = min(rows, most_tokens(mlp.experts_per_token, spec.hidden))
            most = max(most, block * mlp.experts_per_token * (spec.hidden + mlp.inner) * 4)
    return most


def _mlp_width(mlp: DenseSpec | MoeSpec, hidden: int, on_gpu: bool) -> int:
    """Numbers that a row's feed-forward block has at once."""
    if isinstance(mlp, DenseSpec):
        return 3 * mlp.inner
    # the shared expert comes after the routed ones, whose sum stays
    shared = 3 * mlp.shared.inner + 2 * hidden if mlp.shared else 0
    routed = 0 if on_gpu else 3 * mlp.inner * mlp.experts_per_token
    return 3 * mlp.num_experts + max(routed, shared)


def _mixer_width(mixer: AttentionSpec | DeltaSpec, on_gpu: bool) -> int:
    """Numbers that a row's mixer has at once."""
    if isinstance(mixer, DeltaSpec):
        keys, values = mixer.key_dim, mixer.value_dim
        if on_gpu:  # projections and convolution; z, results and their norm; kernels.triton.delta
            return 2 * mixer.channels + mixer.num_value_heads * (3 * values + keys + 65)
        # two of the convolution's in float64
        return 6 * mixer.channels + mixer.num_value_heads * (2 * keys + 4 * values)
    gate = 5 if mixer.gated else 0  # beside q, in float64 on the way
    return ((2 + gate) * mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim
