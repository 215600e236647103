"""What the GPU's kernels do not compute yet: such a model is refused before anything is read."""

from __future__ import annotations

from collections.abc import Iterable

from ftd.errors import UnsupportedModel
from ftd.kernels.activation import SILU
from ftd.kernels.formats import FORMATS, ExpertLayout, WeightFormat
from ftd.model.spec import ModelSpec, MoeSpec


def refuse_unsupported(
    spec: ModelSpec, layout: ExpertLayout, dense_formats: Iterable[WeightFormat]
) -> None:
    """Raises UnsupportedModel for formats, biases and activations that only the CPU computes."""
    lacking = {fmt.name for fmt in dense_formats if fmt.scaled}
    lacking |= {m.format.name for m in layout.matrices.values() if m.format.scaled}
    moes = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    if lacking:
        what = "weights stored as " + ", ".join(sorted(lacking))
    elif any(moe.bias for moe in moes):
        what = "experts with biases"
    elif any(moe.activation != SILU for moe in moes):
        what = "experts with another activation than silu"
    else:
        return
    plain = ", ".join(row.name for row in FORMATS.values() if not row.scaled)
    raise UnsupportedModel(
        f"the GPU does not compute {what}, in this version",
        hint=f"use --device cpu, or a checkpoint of the model stored as {plain}",
    )
