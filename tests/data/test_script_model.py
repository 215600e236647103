"""The script file and the committed script model belong together."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

DATA = Path(__file__).parent
MODEL = DATA / "script-model"
sys.path.insert(0, str(DATA.parents[1] / "tools"))

from script_book import MARKERS, Book, Encoder, Piece, read  # noqa: E402
from tiny_qwen3_moe import chat_template, load  # noqa: E402
from train_script_model import go_on  # noqa: E402

BOOK = read(DATA / "scripts.yaml")
ANSWERS = json.loads((MODEL / "answers.json").read_text())
CONFIG = json.loads((MODEL / "config.json").read_text())


@pytest.fixture(scope="module")
def encoder():
    return Encoder(Tokenizer.from_file(str(MODEL / "tokenizer.json")))


@pytest.fixture(scope="module")
def template():
    return chat_template(json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"])


def test_model_was_trained_on_this_script_file(encoder):
    assert ANSWERS.keys() == BOOK.scripts.keys()
    for key, script in BOOK.scripts.items():
        want = ANSWERS[key]
        assert want["answer"] == script.answer()
        assert want["answer_without_thinking"] == script.answer(thinking=False)
        assert want["token_ids"] == encoder.answer(script) + encoder.text("<|im_end|>")


def test_tokens_decode_to_the_scripted_text(encoder):
    for want in ANSWERS.values():
        decoded = encoder.whole.decode(want["token_ids"][:-1], skip_special_tokens=False)
        assert decoded == want["answer"]


def test_each_key_is_one_token_and_stands_in_no_answer(encoder):
    keys = {encoder.text(key)[0] for key in ANSWERS}
    assert all(len(encoder.text(f"say {key}!")) == 2 + len(encoder.text("say ")) for key in ANSWERS)
    for want in ANSWERS.values():
        assert not keys & set(want["token_ids"])
        assert not keys & set(encoder.text(want["answer"] + want["after_tool"]))


def test_spelled_markers_are_ordinary_tokens(encoder):
    markers = {encoder.text(marker)[0] for marker in MARKERS}
    for key in ("S08", "S30", "S31", "S32"):
        script = BOOK.scripts[key]
        spelled = encoder.pieces(p for p in script.pieces() if not p.markers)
        assert not markers & set(spelled)
    assert encoder.pieces([Piece("<think>")]) == encoder.text("<think>")


def test_calls_are_valid_json_with_the_scripted_arguments():
    for script in BOOK.scripts.values():
        bodies = [p.text for p in script.pieces() if p.text.startswith('{"name"')]
        if script.calls:
            assert [json.loads(body) for body in bodies] == list(script.calls)


@pytest.mark.parametrize("thinking", [True, False])
def test_template_takes_what_clients_send(template, encoder, thinking):
    parts = [{"type": "text", "text": "say "}, {"type": "text", "text": "S01"}]
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "one"},
        {"role": "developer", "content": "two"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": parts},
        {"role": "system", "content": "three"},
        {"role": "assistant", "reasoning_content": "hm", "content": "S02"},
        {"role": "user", "content": "S03"},
        {"role": "user", "content": ""},
    ]
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    render = {"messages": messages, "add_generation_prompt": True, "enable_thinking": thinking}
    text = template.render(**render, tools=tools)
    assert text.endswith("assistant\n" if thinking else "assistant\n<think>\n\n</think>\n\n")
    assert all(part in text for part in ("one", "two", "say S01", "three", "hm\n</think>\n\nS02"))
    assert text.count("<|im_start|>") == text.count("<|im_end|>") + 1 == 10
    calls = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert f"{calls}\n{calls}<|im_end|>" in text


def test_history_is_rendered_as_it_was_generated(template, encoder):
    for key, script in BOOK.scripts.items():
        if script.raw:
            continue
        calls = [{"type": "function", "function": call} for call in script.calls]
        asked = [{"role": "user", "content": key}]
        said = {"role": "assistant", "content": script.text, "tool_calls": calls}
        for thinking in (True, False):
            said["reasoning_content"] = script.thinking if thinking else None
            prompt = template.render(
                messages=asked, add_generation_prompt=True, enable_thinking=thinking
            )
            later = template.render(messages=[*asked, said], enable_thinking=thinking)
            assert later == prompt + script.answer(thinking) + "<|im_end|>\n", key


def test_config_windows_every_layer_and_holds_64k_tokens(encoder):
    assert CONFIG["use_sliding_window"] and CONFIG["sliding_window"] == 4096
    assert CONFIG["max_position_embeddings"] == 65536
    assert encoder.whole.get_vocab_size() <= CONFIG["vocab_size"]
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        embed = file.get_slice("model.embed_tokens.weight")
        assert embed.get_shape() == [CONFIG["vocab_size"], CONFIG["hidden_size"]]
        assert embed.get_dtype() == "BF16"
        names = file.keys()
    layers = {name.split(".")[2] for name in names if ".layers." in name}
    assert len(layers) == CONFIG["num_hidden_layers"]


def test_going_on_keeps_what_is_known_and_adds_a_token_for_a_new_key():
    book = Book({**BOOK.scripts, "S99": BOOK.scripts["S10"]}, BOOK.without_key, BOOK.after_tool)
    tokenizer, model = go_on(book, MODEL)
    known = load(MODEL).embed.weight
    assert tokenizer.encode("S99").ids == [CONFIG["vocab_size"]]
    assert len(model.embed.weight) % 64 == 0
    assert torch.equal(model.embed.weight[: len(known)], known)


def test_each_way_to_compute_experts_gives_the_same():
    layer = load(MODEL).layers[0]
    x = torch.randn(2, 9, CONFIG["hidden_size"])
    gates = torch.rand(2, 9, CONFIG["num_experts"]) * (
        torch.rand(2, 9, CONFIG["num_experts"]) < 0.4
    )
    torch.testing.assert_close(layer.chosen_experts(x, gates), layer.all_experts(x, gates))
