"""Checkpoints whose experts are holes: read by ``HollowReader`` they are whole models."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ftd.checkpoint.headers import check, read_checkpoint
from ftd.checkpoint.load import load_weights
from ftd.experts.host_pool import HostPool
from ftd.model.registry import architecture_for

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from hollow import HOLES, HollowReader, runs
from make_synthetic import make
from synthetic_families import PRESETS

TINY = [(name, fmt) for name in PRESETS if "tiny" in name for fmt in PRESETS[name][0].formats]
FEW = 3  # does not divide the 16 experts of a layer


def loaded(path: Path, layers: int, **options: object) -> HostPool:
    checkpoint = read_checkpoint(path)
    architecture = architecture_for(checkpoint.config)
    spec = architecture.spec(checkpoint.config, checkpoint.generation_config)
    layout = check(checkpoint, architecture, spec)
    pool = HostPool(layers, 16, layout, range(layers))
    load_weights(checkpoint, architecture, spec, pool, lambda *_: None, lambda: False, **options)
    return pool


@pytest.mark.parametrize(("preset", "fmt"), TINY)
def test_every_record_of_a_hollow_checkpoint_holds_one_of_its_experts(tmp_path, preset, fmt):
    make(tmp_path, preset, layers=2, fmt=fmt, hollow=FEW)
    pool = loaded(tmp_path, 2, read=HollowReader(), threads=2)
    records = [[bytes(pool.record(layer, e)) for e in range(16)] for layer in range(2)]
    pool.close()
    assert len(set(records[0])) == FEW
    for layer in records:
        assert layer == [records[0][e % FEW] for e in range(16)]


def test_the_bytes_of_a_hole_are_the_experts_of_a_smaller_model(tmp_path):
    make(tmp_path, "tiny", layers=1, fmt="nvfp4", hollow=16)
    (file,) = (name for name, found in json.loads((tmp_path / HOLES).read_text()).items() if found)
    fd = os.open(tmp_path / file, os.O_RDONLY)
    size = os.fstat(fd).st_size
    read, whole, at = HollowReader(), bytearray(size), 0
    while at < size:  # in pieces that end at no border
        at += read(fd, [memoryview(whole)[at : at + 1000], memoryview(whole)[at + 1000 :][:77]], at)
    ((begin, end, source, period),) = json.loads((tmp_path / HOLES).read_text())[file]
    assert (source, period) == (0, end - begin)  # all sixteen are there
    assert whole[begin:end] == (tmp_path / "experts.bin").read_bytes()
    assert os.pread(fd, begin, 0) == whole[:begin]
    assert not any(os.pread(fd, end - begin, begin))  # to whoever reads the file it is empty
    os.close(fd)


def test_separate_experts_are_one_run_and_stacked_tensors_one_each():
    sizes = {"gate": 5, "m.experts.0.up": 2, "m.experts.1.up": 2, "norm": 1,
             "m.experts.up": 8, "m.experts.down": 8, "m.shared_expert.up": 4}  # fmt: skip
    assert runs(sizes, 100) == [(105, 109), (110, 118), (118, 126)]


def test_other_checkpoints_are_read_as_they_are(tmp_path):
    make(tmp_path, "tiny", layers=1)
    pools = [loaded(tmp_path, 1), loaded(tmp_path, 1, read=HollowReader())]
    one, other = ([bytes(pool.record(0, e)) for e in range(16)] for pool in pools)
    assert one == other
    assert len(set(one)) == 16
