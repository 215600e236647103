"""Layers that keep no more than a window: which they are, and the copies to resume from."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ftd.kv.cache import KvCache
from ftd.kv.window_cache import WindowPages, WindowStates
from ftd.kv.windowing import MOST_WINDOW_TOKENS, Windowing, windowing
from ftd.model.registry import architecture_for
from ftd.model.spec import LayerSpec, ModelSpec

ORACLES = Path(__file__).parents[1] / "data" / "oracles"
PAGE = 4


def spec_of(family: str) -> ModelSpec:
    config = json.loads((ORACLES / family / "config.json").read_text())
    return architecture_for(config).spec(config, {})


def with_windows(family: str, windows: list[int | None]) -> ModelSpec:
    """A family's first layer, once for each window."""
    spec = spec_of(family)
    first = spec.layers[0]
    layers = [LayerSpec(replace(first.attention, window=w), first.mlp) for w in windows]
    return replace(spec, layers=tuple(layers))


class TestWhichLayers:
    def test_those_that_alternate_with_layers_that_see_everything(self):
        found = windowing(with_windows("gpt_oss", [128, None] * 18))
        assert found is not None
        assert found.layers == tuple(range(0, 36, 2)) and found.tokens == 127

    def test_one_layer_stays_in_the_tree_s_pages_where_all_have_windows(self):
        found = windowing(with_windows("qwen3_moe", [24] * 4))
        assert found is not None and found.layers == (1, 2, 3)

    @pytest.mark.parametrize(
        "windows", [[None, None], [None, MOST_WINDOW_TOKENS + 1], [None, 5000]], ids=str
    )
    def test_none_that_sees_everything_or_nearly_so(self, windows):
        assert windowing(with_windows("mixtral", windows)) is None

    def test_the_widest_of_several_windows_is_kept(self):
        found = windowing(with_windows("mixtral", [None, 8, 32, None, 16]))
        assert found is not None and found.layers == (1, 2, 4) and found.tokens == 31

    def test_no_model_with_recurrent_layers_has_them(self):
        assert windowing(spec_of("qwen3_next")) is None


def test_what_a_token_and_a_copy_take():
    found = Windowing(tuple(range(18)), 127, 8, 64)
    assert found.token_bytes(2) == 18 * 2 * 8 * 64 * 2
    assert found.slot_bytes(2) == 127 * found.token_bytes(2)


WINDOWING = Windowing((0, 2), 9, 2, 3)


@pytest.fixture
def pages() -> WindowPages:
    return WindowPages(WINDOWING, 12, PAGE, torch.float32)


def write(pages: WindowPages, table: list[int], positions: range) -> None:
    """Numbers that tell layer, position and place of a token apart."""
    for part, layer in ((0, pages.k), (1, pages.v)):
        for i, tensor in layer.items():
            for p in positions:
                at = tensor[table[p // PAGE], p % PAGE]
                at[:] = 1000 * i + 500 * part + p + torch.arange(6).view(2, 3) / 8


@pytest.mark.parametrize("position", [*range(1, 14), 20, 23])
def test_a_copy_brings_back_all_that_is_seen_from_its_position(pages, position):
    write(pages, [3, 7, 1, 9, 4, 8], range(position))
    states = WindowStates(WINDOWING, 2, torch.float32)
    pages.save([3, 7, 1, 9, 4, 8], position, states.slot(1))
    other = WindowPages(WINDOWING, 12, PAGE, torch.float32)
    table = [5, 2, 11, 6, 10, 1]
    other.load(table, position, states.slot(1))
    for p in range(max(0, position - 9), position):
        for mine, theirs in ((pages.k, other.k), (pages.v, other.v)):
            for layer in (0, 2):
                was = mine[layer][[3, 7, 1, 9, 4, 8][p // PAGE], p % PAGE]
                assert was.any() and theirs[layer][table[p // PAGE], p % PAGE].equal(was)
    states.close()


def test_closing_gives_the_memory_back(pages):
    memory = weakref.ref(pages.k[0]._base)
    assert memory() is not None
    pages.close()
    assert memory() is None


def test_the_cache_has_all_layers_in_order_and_moves_only_its_own():
    spec = with_windows("mixtral", [None, 8, None, 8])
    found = windowing(spec)
    windows = WindowPages(found, 5, PAGE, torch.float32)
    cache = KvCache(spec, 6, PAGE, torch.float32, windows=windows)
    whole = KvCache(spec, 6, PAGE, torch.float32)
    assert 2 * cache.page_bytes == whole.page_bytes
    assert [len(layer) for layer in cache.k] == [6, 5, 6, 5]
    for layer, (k, v) in enumerate(zip(cache.k, cache.v, strict=True)):
        k[:], v[:] = layer, -layer
        k[2], v[2] = 10 + layer, 20 + layer
    cache.move([(2, 4)])
    cache.copy(2, 3, PAGE - 1)
    data = cache.gather([2])
    cache.scatter([0], data)
    for layer in (0, 2):
        assert (cache.k[layer][4] == 10 + layer).all() and (cache.v[layer][0] == 20 + layer).all()
        assert (cache.k[layer][3, : PAGE - 1] == 10 + layer).all()
        assert (cache.k[layer][3, PAGE - 1] == layer).all()
    for layer in (1, 3):
        assert (cache.k[layer][[0, 3, 4]] == layer).all()
    cache.close()
