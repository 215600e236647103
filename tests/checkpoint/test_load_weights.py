from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftd.checkpoint import load
from ftd.checkpoint.headers import check, read_checkpoint
from ftd.checkpoint.load import Piece, load_weights, plan_reads
from ftd.checkpoint.stored import Section
from ftd.checkpoint.tensorfile import TensorInfo
from ftd.errors import CheckpointError, NotReady
from ftd.experts.host_pool import HostPool


def open_pool(maker, **options) -> tuple:
    checkpoint = read_checkpoint(maker.path)
    layout = check(checkpoint, maker.architecture, maker.spec)
    layers = maker.spec.moe_layers
    return checkpoint, HostPool(len(layers), maker.config["num_experts"], layout, layers, **options)


def load_all(maker, progress=lambda done, total: None, cancelled=lambda: False, **options):
    checkpoint, pool = open_pool(maker)
    dense = load_weights(
        checkpoint, maker.architecture, maker.spec, pool, progress, cancelled, **options
    )
    return dense, pool


@pytest.mark.parametrize(("threads", "read_bytes"), [(1, 37), (5, 37), (5, 1 << 20)])
@pytest.mark.parametrize("kind", [("BF16", False), ("BF16", True), ("F32", False)], ids=str)
def test_every_byte_lands_in_its_place(maker, monkeypatch, threads, read_bytes, kind):
    monkeypatch.setattr(load, "READ_BYTES", read_bytes)
    maker.dtype, maker.architecture.fused = kind
    maker.fill().write()
    dense, pool = load_all(maker, threads=threads)

    assert dense.keys() == maker.architecture.dense_tensors(maker.spec).keys()
    for name, tensor in dense.items():
        _, shape, data = maker.tensors[name]
        assert tuple(tensor.shape) == shape
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == data
    for layer in maker.spec.moe_layers:
        for e in range(maker.config["num_experts"]):
            parts = maker.architecture.expert_parts(maker.spec, layer, e)
            want = b""
            for name in ("gate", "up", "down"):
                part = parts[name]
                _, shape, data = maker.tensors[part.tensor]
                if part.index is not None:
                    size = len(data) // shape[0]
                    data = data[part.index * size :][:size]
                if part.rows is not None:
                    row = len(data) // shape[1]
                    data = data[part.rows[0] * row : part.rows[1] * row]
                want += data
            assert pool.record(layer, e).tobytes()[: len(want)] == want


def test_progress_grows_to_the_total(maker, monkeypatch):
    monkeypatch.setattr(load, "READ_BYTES", 100)
    maker.write()
    seen = []
    load_all(maker, progress=lambda done, total: seen.append((done, total)))
    total = sum(len(data) for _, _, data in maker.tensors.values())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (total, total)


def test_ignored_tensors_are_not_read(maker):
    size = sum(len(data) for _, _, data in maker.tensors.values())
    maker.tensors["mtp.0.weight"] = ("U8", (1000,), bytes(1000))
    maker.write()
    seen = []
    load_all(maker, progress=lambda done, total: seen.append(total))
    assert set(seen) == {size}


def test_a_cancel_ends_the_load_before_the_next_read(maker, monkeypatch):
    monkeypatch.setattr(load, "READ_BYTES", 100)
    maker.write()
    reads = []
    with pytest.raises(NotReady, match="loading was cancelled after"):
        load_all(
            maker,
            progress=lambda done, total: reads.append(done),
            cancelled=lambda: len(reads) >= 3,
            threads=1,
        )
    assert len(reads) == 3


def test_no_thread_is_left_after_a_failure(maker):
    maker.write()
    with pytest.raises(NotReady):
        load_all(maker, cancelled=lambda: True)
    assert not [t for t in threading.enumerate() if t.name.startswith("ftd-load")]


def test_a_read_that_fails_names_file_and_tensor(maker, monkeypatch):
    maker.write()

    def fail(fd, buffers, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"safetensors: tensor model.*: Input/output error"):
        load_all(maker, threads=1)


def test_reads_that_come_short_are_continued(maker, monkeypatch):
    maker.write()
    whole, _ = load_all(maker)
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset)
    )
    short, pool = load_all(maker)
    assert all(torch.equal(whole[n].view(torch.uint8), short[n].view(torch.uint8)) for n in whole)
    assert pool.record(1, 3).any()


def test_a_file_cut_off_after_the_check_is_noticed(maker):
    maker.write()
    checkpoint, pool = open_pool(maker)
    file = max(checkpoint.files)
    os.truncate(file, 300)
    with pytest.raises(CheckpointError, match="changed after its header was checked") as e:
        load_weights(
            checkpoint, maker.architecture, maker.spec, pool, lambda *_: None, lambda: False
        )
    assert f"{file}" in str(e.value)


def test_a_file_cut_off_while_it_is_read_is_noticed(maker, monkeypatch):
    maker.write()
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    with pytest.raises(CheckpointError, match=r"ends at byte .* within tensor model"):
        load_all(maker)


def test_a_file_written_while_it_is_read_is_noticed(maker):
    maker.write()
    checkpoint, pool = open_pool(maker)
    file = min(checkpoint.files)

    def touch(done: int, total: int) -> None:
        os.utime(file, ns=(0, 0))

    with pytest.raises(CheckpointError, match=r"00001.*changed after"):
        load_weights(checkpoint, maker.architecture, maker.spec, pool, touch, lambda: False)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 50)), max_size=30), st.integers(1, 64))
def test_reads_cover_every_piece_once_and_are_contiguous(sizes, limit):
    """Pieces with gaps of 0 or 1 bytes: joined where there is no gap, never beyond a read."""
    pieces, at = [], 0
    for gap, size in sizes:
        info = TensorInfo("t", "U8", (size,), "file", at + gap, size)
        pieces.append(Piece(info, at + gap, memoryview(bytearray(size))))
        at += gap + size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "READ_BYTES", limit)
        batches = plan_reads(pieces[::-1])
    want = [b for p in pieces for b in range(p.begin, p.end)]
    assert [b for batch in batches for p in batch for b in range(p.begin, p.end)] == want
    for batch in batches:
        assert all(a.end == b.begin for a, b in itertools.pairwise(batch))
        assert batch[-1].end - batch[0].begin <= limit


def test_a_scale_that_is_converted_is_read_with_the_matrix_before_it():
    numbers, scale = (
        TensorInfo(name, dtype, (2,), "file", begin, size)
        for name, dtype, begin, size in (("w", "U8", 0, 2), ("s", "BF16", 2, 4))
    )
    target, plan = bytearray(6), load._Plan()
    plan.section(Section(numbers, 0, 2), memoryview(target))
    for half in (0, 1):  # two parts of one range, as rows that take turns
        part = partial(torch.narrow, dim=0, start=2 * half, length=2)
        plan.section(Section(scale, 2, 4, part), memoryview(target)[2 + 2 * half :])
    (job,) = plan.jobs()
    assert (job.begin, job.end) == (0, 6)

    def fill(batch: list[Piece]) -> None:
        for piece in batch:
            piece.target[:] = bytes(range(piece.begin, piece.end))

    job.run(fill)
    assert target == bytes(range(6))


CHILD = """
import json, re, sys
sys.path[:0] = [sys.argv[2]]
import torch
from pathlib import Path
from conftest import CheckpointMaker
from ftd.checkpoint.headers import check, read_checkpoint
from ftd.checkpoint.load import load_weights
from ftd.experts.host_pool import HostPool

maker = CheckpointMaker(Path(sys.argv[1]))
maker.config = json.loads((maker.path / "config.json").read_text())
checkpoint = read_checkpoint(maker.path)
layout = check(checkpoint, maker.architecture, maker.spec)
pool = HostPool(2, maker.config["num_experts"], layout, (0, 1))
load_weights(checkpoint, maker.architecture, maker.spec, pool, lambda *_: None, lambda: False)
peak_kib = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
print(json.dumps([int(peak_kib) * 1024, checkpoint.num_bytes]))
"""


def test_peak_memory_of_a_load_stays_within_the_promise(maker):
    """At most 1.15 x the weights + 0.5 GB, torch itself included: a second copy would show."""
    size = 512 << 20
    maker.config |= {"hidden_size": 1024, "num_experts": 32, "vocab_size": 1024}
    maker.config["moe_intermediate_size"] = size // (2 * 32 * 3 * 1024 * 2)
    maker.fill(zeros=True).write()
    here = os.path.dirname(__file__)
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(maker.path), here], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    peak, weights = json.loads(run.stdout)
    assert weights > size
    assert peak <= 1.15 * weights + 0.5e9, (peak, weights)
