"""Writes recorded routing as the .npy file that tools/simulate.py reads."""

from __future__ import annotations

import base64
from pathlib import Path

from ftd.control import protocol as p


def save_trace(file: Path, result: p.TraceResult) -> None:
    """Raises OSError: the file cannot be written."""
    import numpy as np  # only here: ftctl starts in a blink

    shape = (result.tokens, result.layers, result.experts_per_token)
    with file.open("wb") as out:  # np.save would add a suffix to a name
        np.save(out, np.frombuffer(base64.b64decode(result.data), result.dtype).reshape(shape))
