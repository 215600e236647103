"""Keys and values of a block of tokens as a file that is checked whole before it is used.

    magic, format, length of head | head: JSON | token ids | pages of KV | states | digest of all

A file is named by its block's key: a digest of the model, of every token before the block and of
those in it. So a name is found by looking at a prompt, and nothing else can lie under it.
"""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

FORMAT = 2
SUFFIX = ".ftdkv"
_MAGIC = b"FTDKV\r\n\x00"  # damaged by whatever takes it for text
_START = struct.Struct("<8sHI")
_DIGEST_BYTES = 32
_READ_BYTES = 2**16  # at first: head and tokens of most blocks


class BlockUnusable(Exception):
    """A file that is no block of this model; the text says why."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a file says of its block."""

    model: str  # digest of weights, type and layout
    parent: str  # key of the block before; empty: this is the first
    begin: int  # tokens before it
    tokens: int
    kv_bytes: int
    chance: float  # of a match
    anchors: tuple[tuple[int, str, str], ...] = ()  # position, kind, session
    states: tuple[tuple[int, float], ...] = ()  # of recurrent layers: position, chance of a match
    state_bytes: int = 0  # of each

    @property
    def data_bytes(self) -> int:
        return self.kv_bytes + len(self.states) * self.state_bytes


def block_key(model: str, parent: str, ids: array[int]) -> str:
    """Name of the block that holds ``ids`` behind the block ``parent``."""
    before = f"{model}/{parent}/".encode()
    return blake2b(before + ids.tobytes(), digest_size=20).hexdigest()


def write_block(path: Path, head: Head, ids: array[int], *data: bytes | memoryview) -> int:
    """Write a file that is whole or not there; returns its bytes. Raises OSError."""
    facts = orjson.dumps(head)
    parts = (_START.pack(_MAGIC, FORMAT, len(facts)), facts, ids.tobytes(), *data)
    digest = blake2b(digest_size=_DIGEST_BYTES)
    part_file = path.with_suffix(".part")
    try:
        with part_file.open("wb") as file:
            for part in parts:
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
        part_file.replace(path)
    except OSError:
        part_file.unlink(missing_ok=True)
        raise
    return sum(map(len, parts)) + _DIGEST_BYTES


def read_head(path: Path, model: str) -> tuple[Head, array[int], int]:
    """What a file says, its tokens and its bytes, without reading keys and values.

    Raises:
        BlockUnusable: foreign, of another model or format, or not of the length it says.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        begin = file.read(_READ_BYTES)
        head, start = _parse_head(begin, model)
        begin += file.read(max(0, start + 4 * head.tokens - len(begin)))
        size = os.fstat(file.fileno()).st_size
    whole = start + 4 * head.tokens + head.data_bytes + _DIGEST_BYTES
    if size != whole:
        raise BlockUnusable(f"it has {size:,} bytes, its head says {whole:,}")
    return head, _tokens(path, head, begin, start), size


def read_block(path: Path, model: str) -> tuple[Head, array[int], memoryview]:
    """Head, tokens, and ``data_bytes`` of KV and states, all checked. Raises as ``read_head``."""
    data = path.read_bytes()
    head, start = _parse_head(data, model)
    if blake2b(data[:-_DIGEST_BYTES], digest_size=_DIGEST_BYTES).digest() != data[-_DIGEST_BYTES:]:
        raise BlockUnusable("its digest does not fit its content")
    rest = memoryview(data)[start + 4 * head.tokens : -_DIGEST_BYTES]
    if len(rest) != head.data_bytes:
        raise BlockUnusable(f"it holds {len(rest):,} bytes, its head says {head.data_bytes:,}")
    return head, _tokens(path, head, data, start), rest


def _tokens(path: Path, head: Head, data: bytes, start: int) -> array[int]:
    ids, end = array("i"), start + 4 * head.tokens
    if len(data) < end:
        raise BlockUnusable("its tokens are cut")
    ids.frombytes(data[start:end])
    if path.stem != block_key(head.model, head.parent, ids):
        raise BlockUnusable("its name does not fit its tokens")
    return ids


def _parse_head(data: bytes, model: str) -> tuple[Head, int]:
    if len(data) < _START.size:
        raise BlockUnusable(f"it has only {len(data)} bytes")
    magic, format_, length = _START.unpack_from(data)
    if magic != _MAGIC:
        raise BlockUnusable("it is no file of ours")
    if format_ != FORMAT:
        raise BlockUnusable(f"it has format {format_}, {FORMAT} is read here")
    start = _START.size + length
    if len(data) < start:
        raise BlockUnusable("its head is cut")
    head = _head(data[_START.size : start])
    if head.model != model:
        raise BlockUnusable("it is of another model")
    return head, start


def _head(data: bytes) -> Head:
    try:
        facts: dict[str, Any] = orjson.loads(data)
        anchors = tuple((int(at), str(kind), str(who)) for at, kind, who in facts.pop("anchors"))
        states = tuple((int(at), float(chance)) for at, chance in facts.pop("states"))
        head = Head(**facts, anchors=anchors, states=states)
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise BlockUnusable("its head is damaged") from error
    numbers = (head.begin, head.tokens, head.kv_bytes, head.state_bytes)
    if not all(isinstance(n, int) and n >= 0 for n in numbers) or not isinstance(
        head.chance, int | float
    ):
        raise BlockUnusable("its head is damaged")
    return head
