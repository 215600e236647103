"""Profiles in an engine: found, calibrated, measured between steps, obeyed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from driving import answer_all, engine_core, request

from ftd.engine import benches
from ftd.engine.measuring import profiling_of
from ftd.engine.profiling import Profiling
from ftd.errors import Busy, ConfigError
from ftd.experts.measure import Slice
from ftd.experts.profile import Figures, Key, Line, Profile
from ftd.experts.profile_store import ProfileStore
from ftd.kernels.cpu import native

KEY = Key("GPU-1", "a processor", 14, "bf16 2048x768")
FIGURES = Figures(1, Line(5000.0, 3e-6), Line(10_000.0, 1e-6))
PROFILE = Profile(KEY, 1000, (FIGURES,), measured_at=1.7e9)


class Fast:
    """A bench that knows its machine."""

    key, gpu_name, expert_bytes, experts_per_token = KEY, "a GPU", 1000, 4
    prefetch_bytes = None
    has_link = has_cpu = has_hits = True
    closed = 0

    def link_s(self, rows, experts, seconds):
        return experts / 5000

    def cpu_s(self, rows, experts, seconds):
        return experts / 10_000

    hits_s = link_s

    def beside(self, rows, experts, seconds):
        return 0.8, 0.8

    def link_asked_s(self, rows, seconds):
        return 2e-6

    def handshake_s(self, seconds):
        return 1e-6

    def cpu_row_s(self, seconds):
        return 20e-6

    def read_bytes_per_s(self, seconds):
        return 1e9

    def fixed_s(self, rows, seconds):
        return None

    def close(self):
        self.closed += 1


class Told:
    parts = 6

    def __init__(self):
        self.tables, self.prompts = [], []

    def split(self, fetch_of, beside):
        self.tables.append([tuple(table) for table in fetch_of])
        self.beside = [tuple(table) for table in beside]

    def share_prompts(self, rates):
        self.prompts.append(rates)


def make(folder, *, calibrates=True, bench=None):
    bench, told = bench or Fast(), Told()
    store = ProfileStore(folder)
    return Profiling(bench, told, store, calibrates=calibrates, clock=lambda: 1.8e9), told, bench


def test_a_stored_profile_is_taken_at_the_start_without_measuring(tmp_path):
    ProfileStore(tmp_path).save(PROFILE)
    profiling, told, bench = make(tmp_path)
    profiling.start()
    assert profiling.profile == PROFILE and not bench.closed
    assert told.tables == [[PROFILE.fetch_of(batch, 4, 6) for batch in (1, 2, 4, 8)]]
    assert told.beside == [PROFILE.fetch_of(batch, 4, 6, beside=True) for batch in (1, 2, 4, 8)]
    assert profiling.source.startswith("the profile of 2023-11-1")


def test_another_machines_profile_is_not_taken(tmp_path):
    ProfileStore(tmp_path).save(replace(PROFILE, key=replace(KEY, gpu="GPU-2")))
    profiling, told, _ = make(tmp_path, calibrates=False)
    profiling.start()
    assert (profiling.profile, told.tables, profiling.source) == (None, [], "")


def test_without_one_rates_come_from_a_quick_calibration(tmp_path):
    profiling, told, bench = make(tmp_path)
    profiling.start()
    assert profiling.profile.quick and bench.closed == 1 and len(told.tables) == 1
    assert profiling.source.startswith("a quick calibration of ")
    assert told.prompts == [profiling.profile.prompt_rates()] and told.prompts[0].cpu_row_s == 20e-6
    assert ProfileStore(tmp_path).find(KEY) == profiling.profile
    again, told, bench = make(tmp_path)
    again.start()
    assert again.profile == profiling.profile and not bench.closed, "kept for the next start"
    ProfileStore(tmp_path).save(replace(profiling.profile, measured_at=1.8e9 - 90_000))
    again.start()
    assert bench.closed == 1, "but not for ever"


def test_a_calibration_that_cannot_be_kept_serves_all_the_same(tmp_path):
    (tmp_path / "file").write_text("")
    profiling, told, _ = make(tmp_path / "file" / "profiles")
    profiling.start()
    assert profiling.profile.quick and len(told.tables) == 1


def test_a_measurement_goes_slice_by_slice_and_is_taken_over_at_its_end(tmp_path):
    profiling, told, bench = make(tmp_path)
    found = profiling.next_slice("mine")
    with pytest.raises(Busy):
        profiling.next_slice("another's")
    profiling.end("another's")
    while isinstance(found, Slice):
        assert told.tables == []
        found = profiling.next_slice("mine")
    assert profiling.profile is found and not found.quick and len(told.tables) == 1
    profiling.end("mine")
    profiling.end("mine")
    assert bench.closed == 1
    profiling.next_slice("another's")
    profiling.end("another's")
    assert bench.closed == 2 and profiling.profile is found, "given up: as it was"


def test_where_there_is_no_link_nothing_is_divided(tmp_path):
    bench = Fast()
    bench.has_link = False
    profiling, told, _ = make(tmp_path, bench=bench)
    profiling.start()
    assert profiling.profile is not None and told.tables == []


def test_a_split_that_is_measured_slower_is_left_for_its_batch_size_alone(tmp_path):
    ProfileStore(tmp_path).save(PROFILE)
    profiling, told, _ = make(tmp_path)
    profiling.start()
    divided = [PROFILE.fetch_of(batch, 4, 6) for batch in (1, 2, 4, 8)]
    every = [tuple(range(len(table))) for table in divided]
    misses = 0
    for _ in range(2000):
        misses += 5
        slower = told.tables[-1][2] == divided[2]
        profiling.stepped(3, misses, 3e-3 if slower else 2e-3)
        profiling.stepped(0, misses := misses + 50, 1.0)  # of prompts: tells nothing
        profiling.stepped(1, misses, 9e-3)  # missed nothing
    assert told.tables[-1] == [divided[0], divided[1], every[2], divided[3]]
    assert told.beside[2] == every[2] and told.beside[3] != every[3]
    assert profiling.source.endswith("; with 4 rows all over the link was faster")
    profiling.take(PROFILE)
    assert told.tables[-1] == divided, "a new profile begins anew"


def test_where_the_link_takes_all_nothing_is_tried(tmp_path):
    slow = replace(PROFILE, figures=(replace(FIGURES, cpu=Line(1.0, 0.0)),))
    ProfileStore(tmp_path).save(slow)
    profiling, told, _ = make(tmp_path)
    profiling.start()
    for step in range(1000):
        profiling.stepped(1, 5 * step, 1e-3)
    assert len(told.tables) == 1


def test_an_engine_measures_between_its_steps(script_model_dir, tmp_path):
    with engine_core(script_model_dir, profile_dir=tmp_path, expert_slots=4) as core:
        undisturbed = answer_all(core, [request("a", range(5, 15))])["a"]
        assert core.status().rates_from == ""
        profiling = profiling_of(core)
        core.drop_anchors(None)
        core.add(request("b", range(5, 15)))
        tokens, found = [], profiling.next_slice(core)
        while isinstance(found, Slice):
            found = profiling.next_slice(core)
            tokens += [t for output in core.step() for t in output.tokens]
        profiling.end(core)
        assert tokens == undisturbed.tokens
        assert found.figures[0].cpu.experts_per_s > 0
        assert core.status().rates_from.startswith("the profile of ")
        profiling.store.save(found)
    with engine_core(script_model_dir, profile_dir=tmp_path) as core:
        assert core.steps.profiling.profile == found


def test_kernels_are_tuned_once_for_all_starts(script_model_dir, tmp_path, monkeypatch):
    if native.unavailable_reason() is not None:
        pytest.skip("the C++ kernels are not built")
    monkeypatch.setattr(benches, "TUNE_FROM_BYTES", 1)
    monkeypatch.setattr(benches, "TUNE_S", 0.01)
    tried = []
    calibrate = benches.calibrate

    def watched(ops, *args):
        tried.append(calibrate(ops, *args).prefetch_bytes)
        return calibrate(ops, *args)

    monkeypatch.setattr(benches, "calibrate", watched)
    with engine_core(script_model_dir, profile_dir=tmp_path) as core:
        profiling = core.steps.profiling
        profile = replace(PROFILE, key=profiling._bench.key, prefetch_bytes=(8192, 2048))
        assert len(tried) == 1 and profiling._bench.prefetch_bytes is not None
        profiling.store.save(profile)
    with engine_core(script_model_dir, profile_dir=tmp_path) as core:
        assert len(tried) == 1 and core.steps.profiling._bench.prefetch_bytes == (8192, 2048)


def test_an_engine_without_experts_to_divide_says_so():
    core = SimpleNamespace(steps=SimpleNamespace(profiling=None))
    with pytest.raises(ConfigError, match="nothing to measure"):
        profiling_of(core)
