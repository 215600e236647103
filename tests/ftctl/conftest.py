import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "lifecycle"))  # scripted_models
sys.path.insert(0, str(Path(__file__).parent))  # test_ftctl, for its daemon on a thread
