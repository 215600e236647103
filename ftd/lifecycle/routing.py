"""Records what the router of a served model chooses, while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from ftd.engine.api import EngineHandle
from ftd.engine.routing import begin_recording, end_recording
from ftd.errors import NotReady

LOOK_S = 0.1


async def record_routing(
    engine: EngineHandle, num_tokens: int, timeout_s: float, progress: Callable[[int, int], None]
) -> np.ndarray:
    """Experts chosen for the next rows, of prompts and answers alike: [tokens, L, K].

    Fewer than ``num_tokens`` where requests bring no more within ``timeout_s``. ``progress`` is
    told the bytes there are, and those there will be.

    Raises:
        RequestInvalid: a number of tokens that cannot be kept.
        Busy: a recording is under way.
        NotReady: nothing was computed in time, or the model went away.
    """
    recorder, row_bytes = await engine.at_safe_point(lambda core: begin_recording(core, num_tokens))
    try:
        async with asyncio.timeout(timeout_s):
            while not recorder.full:
                progress(recorder.num_tokens * row_bytes, num_tokens * row_bytes)
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        pass
    finally:
        await asyncio.shield(engine.at_safe_point(end_recording))
    if not recorder.num_tokens:
        raise NotReady(
            f"no token was computed within {timeout_s:g} s",
            hint="send requests meanwhile, or wait longer with --timeout",
        )
    return recorder.kept()
