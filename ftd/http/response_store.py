"""Responses that clients may come back to: kept in memory, for a while, up to a size."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from ftd.errors import RequestInvalid
from ftd.units import MiB

MAX_RESPONSES = 1000
MAX_BYTES = 64 * MiB
MAX_AGE_S = 3600.0

Item = dict[str, Any]


class NoSuchResponse(RequestInvalid):
    code, status = "response_not_found", 404


@dataclass(frozen=True, slots=True)
class Stored:
    response: Item  # as it was answered
    items: list[Item]  # the whole conversation before its output
    size_bytes: int
    stored_s: float


class ResponseStore:
    """The oldest go first when there are too many; all of it is gone after a restart.

    Readers in worker threads look conversations up, hence the lock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def put(self, response: Item, items: list[Item]) -> None:
        size = len(orjson.dumps(response)) + len(orjson.dumps(items))
        with self._lock:
            self._drop(response["id"])
            self._stored[response["id"]] = Stored(response, items, size, self._clock())
            self._bytes += size
            self._tidy()

    def get(self, response_id: str, *, param: str | None = None) -> Stored:
        """Raises NoSuchResponse."""
        with self._lock:
            self._tidy()
            stored = self._stored.get(response_id)
        if stored is None:
            raise NoSuchResponse(
                f"there is no stored response {response_id[:100]!r}",
                param=param,
                hint=f"responses are kept in memory for {MAX_AGE_S / 3600:g} h, the newest "
                f"{MAX_RESPONSES:,}, unless store is false; send the whole conversation instead",
            )
        return stored

    def delete(self, response_id: str) -> None:
        """Raises NoSuchResponse."""
        self.get(response_id)
        with self._lock:
            self._drop(response_id)

    def item(self, item_id: str) -> Item | None:
        """An output item of any stored response, newest first."""
        with self._lock:
            stored = list(self._stored.values())
        found = (i for s in reversed(stored) for i in s.response["output"] if i["id"] == item_id)
        return next(found, None)

    def _drop(self, response_id: str) -> None:
        if (stored := self._stored.pop(response_id, None)) is not None:
            self._bytes -= stored.size_bytes

    def _tidy(self) -> None:
        born_after_s = self._clock() - MAX_AGE_S
        while self._stored:
            oldest_id, oldest = next(iter(self._stored.items()))
            crowded = len(self._stored) > MAX_RESPONSES or self._bytes > MAX_BYTES
            if not crowded and oldest.stored_s >= born_after_s:
                return
            self._drop(oldest_id)
