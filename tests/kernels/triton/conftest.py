from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]  # helpers

import fast_interpreter  # noqa: E402

fast_interpreter.install()
