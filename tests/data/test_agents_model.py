"""The model that real coding agents are run against knows their scripts."""

import json
import sys
from pathlib import Path

DATA = Path(__file__).parent
sys.path.insert(0, str(DATA.parents[1] / "tools"))

from agent_clients import CLIENTS  # noqa: E402
from script_book import Encoder, read  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

MODEL = DATA / "agents-model"
BOOK = read(DATA / "scripts.yaml", agents=True)
ANSWERS = json.loads((MODEL / "answers.json").read_text())


def test_model_was_trained_on_these_scripts():
    encoder = Encoder(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    assert ANSWERS.keys() == BOOK.scripts.keys()
    for key, script in BOOK.scripts.items():
        assert len(encoder.text(key)) == 1
        assert ANSWERS[key]["token_ids"] == encoder.answer(script) + encoder.text("<|im_end|>")


def test_each_client_asks_for_a_script_of_it():
    for client in CLIENTS.values():
        assert {client.key, client.second_key} <= BOOK.scripts.keys()
        assert "hello.txt" in BOOK.scripts[client.key].answer()
