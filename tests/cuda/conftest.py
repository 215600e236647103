from __future__ import annotations

import sys
from pathlib import Path

# helpers beside these tests, those of the engine's and the models' tests, and the oracle's checks
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("cuda", "engine", "model", "oracles")]
