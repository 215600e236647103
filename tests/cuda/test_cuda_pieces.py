"""Rows, tables and pieces of the CUDA device, without a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftd.cuda import pinned
from ftd.cuda.device import choose_gpu, look_for_gpu
from ftd.cuda.graphs import BATCHES, DecodeInput, DecodeRow, batch_for, fill_pages
from ftd.cuda.memory import DeviceMemory
from ftd.cuda.tables import Download, Upload
from ftd.engine.batch import Span, pack
from ftd.engine.cuda_runner import padded, warm_up_sizes, waves_of
from ftd.errors import BudgetExceeded, ConfigError
from ftd.experts.host_pool import HostPool
from ftd.kernels.formats import FORMATS, expert_layout

CPU = torch.device("cpu")


def test_the_smallest_graph_that_holds_the_rows():
    assert [batch_for(n) for n in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, None]
    assert max(BATCHES) == 8


def test_more_rows_than_the_largest_graph_holds_go_in_waves():
    cuts = [[range(40)[rows] for rows in waves_of(n)] for n in (1, 8, 9, 20)]
    assert [[len(wave) for wave in waves] for waves in cuts] == [[1], [8], [8, 1], [8, 8, 4]]
    assert [i for wave in cuts[-1] for i in wave] == list(range(20))


def test_rows_not_in_use_have_position_minus_one():
    block = DecodeInput(4)
    block.fill([DecodeRow(7, 30, [1, 2]), None, DecodeRow(9, 0, [5])])
    assert block.position.tolist() == [30, -1, 0, -1]
    assert block.ids[0] == 7 and block.ids[2] == 9
    block.fill([None])
    assert block.position.tolist() == [-1] * 4


def test_the_part_without_ids_leaves_them():
    host, device = DecodeInput(2), DecodeInput(2)
    device.ids[:] = torch.tensor([11, 12])
    host.fill([DecodeRow(1, 5, [0]), DecodeRow(2, 6, [0])])
    device.without_ids.copy_(host.without_ids)
    assert device.ids.tolist() == [11, 12] and device.position.tolist() == [5, 6]


def test_page_tables_are_sent_when_they_change():
    table = torch.zeros(2, 4, dtype=torch.int32)
    pages = [[3, 1], None]
    assert fill_pages(table, pages) and not fill_pages(table, pages)
    assert table.tolist() == [[3, 1, 0, 0], [0] * 4]
    assert fill_pages(table, [[3, 1, 2]])


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
