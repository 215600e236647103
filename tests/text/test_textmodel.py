"""What a checkpoint directory says about text, whole and broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ftd.errors import CheckpointError, RequestInvalid
from ftd.text.textmodel import TextModel

DEMO = Path(__file__).parents[2] / "ftd" / "demo"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "generation_config.json",
    ):
        shutil.copyfile(DEMO / name, tmp_path / name)
    return tmp_path


def edit(path: Path, **fields: Any) -> None:
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def test_eos_ids_come_from_every_place(model_dir: Path):
    edit(model_dir / "config.json", eos_token_id=7)
    edit(model_dir / "generation_config.json", eos_token_id=[2, 9])
    edit(model_dir / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert TextModel(model_dir).eos_ids == {7, 2, 9, 0}


def test_sampling_defaults_come_from_generation_config(model_dir: Path):
    settings = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    edit(model_dir / "generation_config.json", do_sample=True, **settings)
    defaults = TextModel(model_dir).defaults
    assert {name: getattr(defaults, name) for name in settings} == settings


def test_do_sample_false_is_greedy(model_dir: Path):
    edit(model_dir / "generation_config.json", do_sample=False, temperature=0.6)
    assert TextModel(model_dir).defaults.temperature == 0


def test_a_directory_without_generation_config_has_plain_defaults(model_dir: Path):
    (model_dir / "generation_config.json").unlink()
    assert TextModel(model_dir).defaults.temperature == 1.0


def test_truncation_and_padding_of_the_file_are_switched_off(model_dir: Path):
    limits = {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    edit(model_dir / "tokenizer.json", truncation=limits)
    assert len(TextModel(model_dir).encode("one two three four five six seven")) > 4


@pytest.mark.parametrize(
    "place", ["chat_template.jinja", "chat_template.json", "processor_config.json"]
)
def test_the_template_is_found_wherever_it_is(model_dir: Path, place: str):
    edit(model_dir / "tokenizer_config.json", chat_template=None)
    source = "{{ messages[0].content }}!{{ eos_token }}"
    (model_dir / place).write_text(
        source if place.endswith("jinja") else json.dumps({"chat_template": source})
    )
    assert TextModel(model_dir).render(USER) == "hi!<|im_end|>"


def test_a_named_list_of_templates(model_dir: Path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    edit(model_dir / "tokenizer_config.json", chat_template=named)
    text = TextModel(model_dir)
    assert text.render(USER) == "d"
    assert text.render(USER, tools=[{"type": "function"}]) == "t"


def test_without_a_template_chats_are_refused_and_text_works(model_dir: Path):
    edit(model_dir / "tokenizer_config.json", chat_template=None)
    text = TextModel(model_dir)
    assert not text.has_chat_template
    assert text.decode(text.encode("works")) == "works"
    with pytest.raises(RequestInvalid, match="no chat template"):
        text.render(USER)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", "[]", "a JSON list"),
        ("generation_config.json", "\x00", "generation_config.json cannot be read"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "does not compile in line 1"),
        ("tokenizer_config.json", '{"chat_template": [7]}', "must be text or a list"),
        ("chat_template.jinja", "{% for %}", "chat_template.jinja: .*does not compile"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read"),
    ],
)
def test_a_broken_file_is_named(model_dir: Path, name: str, content: Any, reason: str):
    path = model_dir / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=reason):
        TextModel(model_dir)


def test_a_template_that_refuses_is_given_the_chat_in_another_form(model_dir: Path):
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.content }}]{% endfor %}"
    )
    edit(model_dir / "tokenizer_config.json", chat_template=strict)
    text = TextModel(model_dir)
    assert text.render([*USER, *USER]) == "[hi\n\nhi]"
    assert text.render([{"role": "system", "content": "s"}, *USER]) == "[s\n\nhi]"
    with pytest.raises(RequestInvalid, match=r"messages\[0\]: roles must alternate"):
        text.render([{"role": "assistant", "content": "a"}])
