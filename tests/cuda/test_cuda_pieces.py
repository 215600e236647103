"""Rows, tables and pieces of the CUDA device, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftd.cuda import pinned
from ftd.cuda.device import choose_gpu, look_for_gpu
from ftd.cuda.graphs import BATCHES, DecodeInput, DecodeRow, batch_for, fill_pages
from ftd.cuda.memory import DeviceMemory
from ftd.cuda.sampling import draw
from ftd.cuda.tables import Download, Upload
from ftd.engine.api import Sampling
from ftd.engine.batch import Span, pack
from ftd.engine.cuda_runner import on_device, padded, warm_up_sizes
from ftd.engine.philox import uniform
from ftd.engine.sampling import Sampler, SamplingState
from ftd.errors import BudgetExceeded, ConfigError
from ftd.experts.host_pool import HostPool
from ftd.kernels.formats import FORMATS, expert_layout

CPU = torch.device("cpu")


def test_the_smallest_graph_that_holds_the_rows():
    assert [batch_for(n) for n in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, None]
    assert max(BATCHES) == 8


def test_rows_not_in_use_have_position_minus_one():
    block = DecodeInput(4)
    block.fill([DecodeRow(7, 30, [1, 2], 0.5, 0.25), None, DecodeRow(9, 0, [5], 0.0, 0.5)])
    assert block.position.tolist() == [30, -1, 0, -1]
    assert block.ids[0] == 7 and block.ids[2] == 9
    assert block.numbers[:, 0].tolist() == [0.5, 0.25]
    block.fill([None])
    assert block.position.tolist() == [-1] * 4


def test_the_part_without_ids_leaves_them():
    host, device = DecodeInput(2), DecodeInput(2)
    device.ids[:] = torch.tensor([11, 12])
    host.fill([DecodeRow(1, 5, [0], 1.0, 0.1), DecodeRow(2, 6, [0], 1.0, 0.2)])
    device.without_ids.copy_(host.without_ids)
    assert device.ids.tolist() == [11, 12] and device.position.tolist() == [5, 6]


def test_page_tables_are_sent_when_they_change():
    table = torch.zeros(2, 4, dtype=torch.int32)
    rows = [DecodeRow(0, 0, [3, 1], 0.0, 0.5), None]
    assert fill_pages(table, rows) and not fill_pages(table, rows)
    assert table.tolist() == [[3, 1, 0, 0], [0] * 4]
    assert fill_pages(table, [DecodeRow(0, 0, [3, 1, 2], 0.0, 0.5)])


@given(
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    begin=st.integers(0, 40),
)
def test_padding_repeats_the_last_row(counts, begin):
    spans = [
        Span(range(100 * i, 100 * i + n), begin, list(range(9 * i, 9 * i + 9)), 1)
        for i, n in enumerate(counts)
    ]
    step = pack(spans, 16)
    wide = padded(step, 12)
    rows = sum(counts)
    assert len(wide.ids) % 16 == 0 and 0 <= len(wide.ids) - rows < 16
    for name in ("ids", "position", "sequence", "place"):
        was, now = getattr(step, name), getattr(wide, name)
        assert now[:rows].equal(was) and (now[rows:] == was[-1]).all()
    assert wide.page_table.shape == (len(counts), 12)
    assert wide.logit_rows.equal(step.logit_rows)


def test_sizes_to_warm_up_with():
    assert warm_up_sizes(300) == [16, 32, 64, 128, 256, 300]
    assert warm_up_sizes(16) == [16] and warm_up_sizes(5) == [5]


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 10_000))
def test_the_device_draws_what_the_sampler_draws(seed, position):
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(position)) * 3
    states = [SamplingState(Sampling(temperature=t, seed=seed), ()) for t in (0.0, 0.7, 1.3)]
    wanted = [d.token for d in Sampler(400).sample(logits, states, [position] * 3)]
    temperature = torch.tensor([0.0, 0.7, 1.3])
    u = torch.full((3,), uniform(seed, position), dtype=torch.float64)
    tokens, finite = draw(logits, temperature, u)
    assert tokens.tolist() == wanted and finite.all()


def test_rows_that_are_not_finite_are_told():
    logits = torch.zeros(2, 5)
    logits[1, 3] = float("nan")
    _, finite = draw(logits, torch.zeros(2), torch.full((2,), 0.5, dtype=torch.float64))
    assert finite.tolist() == [True, False]


@pytest.mark.parametrize(
    ("changes", "suits"),
    [
        ({}, True),
        ({"temperature": 0.0, "top_p": 0.5}, True),
        ({"top_p": 0.9}, False),
        ({"top_k": 5}, False),
        ({"min_p": 0.1}, False),
        ({"logprobs": 0}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"logit_bias": ((1, 2.0),)}, False),
    ],
)
def test_rows_that_the_device_can_draw(changes, suits):
    assert on_device(SamplingState(Sampling(**changes), (1, 2))) is suits


@pytest.mark.parametrize(("mask", "suits"), [(None, True), (torch.zeros(1), False)])
def test_the_device_draws_only_where_anything_may_come(mask, suits):
    constraint = SimpleNamespace(mask=lambda: mask, accept=lambda token: None)
    assert on_device(SamplingState(Sampling(), (), constraint)) is suits


def test_uploads_and_downloads_do_not_share_memory_with_their_source():
    tensor = torch.zeros(3)
    upload, download = Upload(tensor), Download([tensor])
    host = torch.arange(3.0)
    upload.send(host)
    host += 10
    fetched = download.fetch()
    tensor.zero_()
    assert fetched.get()[0].tolist() == [0, 1, 2]


@given(num_bytes=st.integers(1, 40), record=st.integers(1, 9))
def test_pieces_cover_the_pool_and_end_with_records(num_bytes, record):
    unit = pinned.PIECE_BYTES // 4
    pieces = pinned.cut(1000, num_bytes * unit, record * unit)
    at = 1000
    for address, size in pieces:
        assert address == at and size > 0
        at += size
    assert at == 1000 + num_bytes * unit
    assert all(size % (record * unit) == 0 for _, size in pieces[:-1])


def test_registering_is_all_or_nothing(monkeypatch):
    layout = expert_layout(FORMATS["bf16"], 64, 32)
    pool = HostPool(2, 4, layout, (0, 1))
    monkeypatch.setattr(pinned, "PIECE_BYTES", 2 * layout.record_bytes)
    registered, undone = [], []
    monkeypatch.setattr(pinned, "unregister_host", undone.append)

    def register_one(address, num_bytes):
        registered.append(address)
        return "no more may be locked" if len(registered) == 3 else None

    done = pinned.register(pool, CPU, register_one=register_one)
    assert not done.pinned and done.reason == "no more may be locked"
    assert len(undone) == len(registered) - 1
    good = pinned.register(pool, CPU, register_one=lambda *_: None)
    assert good.pinned
    good.close()
    pool.close()


def test_a_plain_range_cannot_grow():
    memory = DeviceMemory(CPU)
    reserved = memory.reserve(1000, 100)
    assert not memory.elastic and reserved.mapped_bytes == 100
    reserved.bytes()[:] = 3
    with pytest.raises(BudgetExceeded, match="cuda-bindings"):
        reserved.resize(1000)
    reserved.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_a_reason_for_auto_and_an_error_for_cuda():
    assert look_for_gpu().gpu is None and look_for_gpu().reason
    assert choose_gpu("auto").gpu is None
    with pytest.raises(ConfigError, match="--device cuda:1: torch") as e:
        choose_gpu("cuda:1")
    assert "--device cpu" in e.value.hint


def test_the_draw_of_a_padded_batch_ignores_neighbours():
    logits = torch.randn(4, 50)
    u = torch.tensor([0.3, 0.9, 0.1, 0.5], dtype=torch.float64)
    alone = draw(logits[:1], torch.ones(1), u[:1])[0]
    assert np.array_equal(draw(logits, torch.ones(4), u)[0][:1], alone)
