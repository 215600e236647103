"""Ids that say where they come from, so that what a client sends back is recognised.

Letters and digits after the prefix: some clients drop everything else.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_SEAL = "ftd1."
MAX_SEALED_CHARS = 4 * 2**20  # of text in one sealed item; a small body may unpack to much


def call_id(prefix: str, request_id: str, answer: int, call: int) -> str:
    """Of the ``call``-th tool call in an answer; the same in every form of that answer."""
    return f"{prefix}{_hex(request_id)}{answer:02x}{call:03x}"


def item_id(prefix: str, request_id: str, index: int) -> str:
    """Of a part of an answer."""
    return f"{prefix}{_hex(request_id)}{index:04x}"


def signature(request_id: str, block: int) -> str:
    """Of a thinking block."""
    return item_id("ftd1", request_id, block)


def _hex(request_id: str) -> str:
    return request_id.rpartition("_" if "_" in request_id else "-")[2]


def seal(text: str) -> str:
    """Text in a form clients give back unread. It is packed, not secret."""
    return _SEAL + base64.b64encode(zlib.compress(text.encode())).decode()


def unseal(sealed: object) -> str | None:
    """The text ``seal`` was given; None if this is no such thing."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEAL):
        return None
    try:
        packed = base64.b64decode(sealed.removeprefix(_SEAL), validate=True)
        return zlib.decompressobj().decompress(packed, MAX_SEALED_CHARS).decode()
    except (binascii.Error, zlib.error, ValueError):
        return None
