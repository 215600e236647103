"""Turns the recording of the router's choices on and off, on the engine thread."""

from __future__ import annotations

from ftd.engine.core import EngineCore
from ftd.errors import Busy, RequestInvalid
from ftd.experts.trace import TraceRecorder
from ftd.model.spec import MoeSpec

MOST_BYTES = 64 << 20  # of a recording, which travels as one line


def begin_recording(core: EngineCore, num_tokens: int) -> tuple[TraceRecorder, int]:
    """What records from here on, and the bytes of a row.

    Raises:
        RequestInvalid: a number of tokens that cannot be kept.
        Busy: a recording is under way.
    """
    if core.experts.recording:
        raise Busy("the routing is being recorded already", hint="wait until that has ended")
    spec = core.model.spec
    mlp = spec.layers[spec.moe_layers[0]].mlp
    assert isinstance(mlp, MoeSpec)
    row_bytes = len(spec.moe_layers) * mlp.experts_per_token * (1 if mlp.num_experts <= 256 else 2)
    if not 1 <= num_tokens <= MOST_BYTES // row_bytes:
        raise RequestInvalid(
            f"{num_tokens:,} tokens of {row_bytes:,} bytes each are asked for, 1 to "
            f"{MOST_BYTES // row_bytes:,} are possible",
            param="tokens",
        )
    recorder = TraceRecorder(len(spec.moe_layers), mlp.num_experts, num_tokens)
    core.experts.record_trace(recorder)
    return recorder, row_bytes


def end_recording(core: EngineCore) -> None:
    core.experts.record_trace(None)
