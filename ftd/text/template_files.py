"""What the files of a checkpoint say of its chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from ftd.errors import CheckpointError

from .template import ChatTemplate

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def load_templates(path: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """By name; ``default`` serves chats, ``tool_use``, where there is one, chats with tools."""
    where, declared = _declared_template(path, tokenizer_config)
    if declared is None:
        return {}
    sources = {"default": declared} if isinstance(declared, str) else _named(declared, where)
    variables = _template_variables(path, tokenizer_config)
    return {
        name: ChatTemplate(source, where=where, variables=variables)
        for name, source in sources.items()
    }


def _declared_template(path: Path, tokenizer_config: Mapping[str, Any]) -> tuple[str, Any]:
    """The file that has the template, and what it says; newer places win."""
    jinja = path / "chat_template.jinja"
    if jinja.is_file():
        try:
            return str(jinja), jinja.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{jinja} cannot be read: {error}", hint="fetch the file again"
            ) from error
    if tokenizer_config.get("chat_template") is not None:
        return str(path / "tokenizer_config.json"), tokenizer_config["chat_template"]
    for name in ("chat_template.json", "processor_config.json"):
        if (declared := read_json(path / name).get("chat_template")) is not None:
            return str(path / name), declared
    return "", None


def _named(declared: Any, where: str) -> dict[str, str]:
    if isinstance(declared, dict):
        declared = [{"name": name, "template": text} for name, text in declared.items()]
    try:
        named = {entry["name"]: entry["template"] for entry in declared}
    except (TypeError, KeyError) as error:
        named = {"": error}
    if not all(isinstance(text, str) and isinstance(name, str) for name, text in named.items()):
        raise CheckpointError(
            f"{where}: chat_template must be text or a list of objects with name and template",
            hint="fetch the file again",
        )
    return named


def _template_variables(path: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, Any]:
    declared = {**read_json(path / "special_tokens_map.json"), **tokenizer_config}
    variables: dict[str, Any] = {
        name: text
        for name in _SPECIAL_TOKENS
        if (text := token_text(declared.get(name))) is not None
    }
    extra = declared.get("additional_special_tokens")
    if isinstance(extra, list):
        variables["additional_special_tokens"] = [
            text for token in extra if (text := token_text(token)) is not None
        ]
    return variables


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty if there is no such file."""
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", hint="fetch the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(value).__name__}, an object is needed",
            hint="fetch the file again",
        )
    return value


def token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
