"""Which architecture serves which model_type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftd.errors import CheckpointError, UnsupportedModel

from .architecture import Architecture
from .gpt_oss import GptOss
from .granitemoe import GraniteMoe
from .mixtral import Mixtral
from .olmoe import Olmoe
from .qwen2_moe import Qwen2Moe
from .qwen3_5_moe import Qwen3_5Moe, Qwen3_5MoeText
from .qwen3_moe import Qwen3Moe
from .qwen3_next import Qwen3Next

_FAMILIES: tuple[Architecture, ...] = (
    GptOss(),
    GraniteMoe(),
    Mixtral(),
    Olmoe(),
    Qwen2Moe(),
    Qwen3_5Moe(),
    Qwen3_5MoeText(),
    Qwen3Moe(),
    Qwen3Next(),
)
ARCHITECTURES: dict[str, Architecture] = {
    model_type: architecture
    for architecture in _FAMILIES
    for model_type in architecture.model_types
}


def architecture_for(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json.

    Raises:
        CheckpointError: it names none.
        UnsupportedModel: one we do not have; the message lists those we have.
    """
    supported = ", ".join(sorted(ARCHITECTURES))
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(
            f"config.json: model_type is {model_type!r}, expected one of {supported}",
            hint="give the directory of a model in Hugging Face layout",
        )
    if model_type not in ARCHITECTURES:
        raise UnsupportedModel(
            f"config.json: model_type {model_type!r} is not supported",
            hint=f"supported: {supported}",
        )
    return ARCHITECTURES[model_type]
