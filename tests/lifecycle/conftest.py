import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # scripted_models, shared by our test folders
