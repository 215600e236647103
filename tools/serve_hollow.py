"""``ftd`` for checkpoints that ``tools/make_synthetic.py --hollow`` has made.

    python tools/serve_hollow.py --model /dev/shm/hollow --vram 8G
    HOLLOW_MEMORY=120G python tools/serve_hollow.py ...

The same program with the same flags; only the bytes of holes come from the experts that are there.
The variable names the memory of a virtual machine that shows less of it before it is used.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from hollow import HollowReader  # noqa: E402

from ftd import daemon  # noqa: E402
from ftd.cli import main  # noqa: E402
from ftd.units import parse_size  # noqa: E402

MEMORY = "HOLLOW_MEMORY"


class HollowModels:
    """``ftd.lifecycle.checkpoints``, imported as late as the daemon imports it."""

    def __getattr__(self, name: str) -> Any:
        from ftd.checkpoint import load
        from ftd.engine import loading, preparing
        from ftd.lifecycle import checkpoints

        if not isinstance(loading.load_weights, partial):
            loading.load_weights = partial(load.load_weights, read=HollowReader())
            if given := os.environ.get(MEMORY):
                grown = _grown(checkpoints.read_machine, parse_size(given))
                checkpoints.read_machine = preparing.read_machine = grown
        return getattr(checkpoints.Checkpoints(), name)


def _grown(read_machine: Any, total_bytes: int) -> Any:
    """Memory that the machine does not show yet counts as available."""

    def read() -> Any:
        found = read_machine()
        hidden = max(0, total_bytes - found.total_bytes)
        return replace(
            found,
            total_bytes=found.total_bytes + hidden,
            available_bytes=found.available_bytes + hidden,
        )

    return read


if __name__ == "__main__":
    serve = daemon.run
    daemon.run = partial(serve, models=HollowModels())
    main()
