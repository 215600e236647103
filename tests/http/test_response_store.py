"""Stored responses: bounded in number, size and age."""

from __future__ import annotations

import pytest

from ftd.http import response_store
from ftd.http.response_store import NoSuchResponse, ResponseStore


def response(number: int, text: str = "") -> dict:
    return {"id": f"resp_{number}", "output": [{"id": f"msg_{number}", "text": text}]}


def test_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 3)
    store = ResponseStore()
    for number in range(5):
        store.put(response(number), [])
    assert store.get("resp_4").response == response(4)
    with pytest.raises(NoSuchResponse, match="resp_1"):
        store.get("resp_1")


def test_the_size_is_bounded(monkeypatch):
    monkeypatch.setattr(response_store, "MAX_BYTES", 5000)
    store = ResponseStore()
    for number in range(20):
        store.put(response(number, "x" * 1000), [])
    assert store._bytes <= 5000
    assert len(store._stored) == 4
    store.put(response(20, "x" * 10_000), [])
    assert store._bytes == 0


def test_they_are_forgotten_after_a_while():
    now = 0.0
    store = ResponseStore(clock=lambda: now)
    store.put(response(1), [])
    now = response_store.MAX_AGE_S + 1
    with pytest.raises(NoSuchResponse):
        store.get("resp_1")
    assert store._bytes == 0


def test_items_are_found_by_id_until_their_response_is_deleted():
    store = ResponseStore()
    store.put(response(1), [])
    assert store.item("msg_1") == {"id": "msg_1", "text": ""}
    store.delete("resp_1")
    assert store.item("msg_1") is None
