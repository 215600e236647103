"""What the documents name is there: files, links between them, flags."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from ftd.config import Config, flag

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", ROOT / "systemd/README.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = re.compile(r"`((?:ftd|ftctl|kernels|tools|tests|docs|systemd)/[\w/.-]*)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
OTHERS = re.compile("systemctl|journalctl|useradd|loginctl|pip install")  # with flags of their own
PLACEHOLDER = "NAME.py"


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Of ftd, and all that are spelled out somewhere: ftctl's, the tools', the clients'."""
    found = {flag(field.name) for field in fields(Config)}
    for folder in ("ftd", "ftctl", "tools", "systemd"):
        for path in (ROOT / folder).iterdir():
            if path.suffix in (".py", ".sh", ".service"):
                found |= set(FLAG.findall(path.read_text()))
    return found


@pytest.mark.parametrize("doc", DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_document_names_exists(doc: Path, known_flags: set[str]):
    text = doc.read_text()
    paths = [name for name in PATH.findall(text) if not name.endswith(PLACEHOLDER)]
    assert [name for name in paths if not (ROOT / name).exists()] == []
    assert [to for to in LINK.findall(text) if not (doc.parent / to).exists()] == []
    ours = "\n".join(line for line in text.splitlines() if not OTHERS.search(line))
    named = {name.replace("--no-", "--") for name in FLAG.findall(ours)}
    assert sorted(named - known_flags) == []
