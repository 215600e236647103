"""Profiles: lines through samples, the split and the machine that follow, and files of them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.errors import ConfigError
from ftd.experts.machines import MACHINES
from ftd.experts.profile import (
    Figures,
    Key,
    Line,
    Profile,
    fit_line,
    from_json,
    to_json,
)
from ftd.experts.profile_store import ProfileStore
from ftd.experts.split import fetch_table, prompt_share

KEY = Key("GPU-1", "a processor", 14, "bf16 2048x768")
BYTES = 3 * 2048 * 768 * 2
FIGURES = Figures(
    1, Line(5393.0, 3e-6), Line(11740.0, 37e-6), Line(350_000.0, 1e-6), 0.97, 0.88, 52e-6, 17e-6
)
PROFILE = Profile(
    KEY,
    BYTES,
    (FIGURES, replace(FIGURES, batch=4, fixed_s=85e-6)),
    130e9,
    measured_at=1.7e9,
    prefetch_bytes=(8192, 2048),
)


@given(
    slope=st.floats(1e-6, 1e-2),
    fixed=st.floats(0, 1e-3),
    counts=st.lists(st.integers(1, 16), min_size=2, unique=True),
)
def test_a_line_is_found_from_its_points(slope, fixed, counts):
    line = fit_line([(n, fixed + n * slope) for n in counts])
    for n in (1, 4, 16):
        assert line.seconds(n) == pytest.approx(fixed + n * slope, rel=0.01, abs=1e-9)


def test_one_point_or_a_falling_line_is_all_experts():
    assert fit_line([(4, 8e-3)]) == Line(500.0, 0.0)
    falling = fit_line([(1, 4e-3), (8, 2e-3)])
    assert falling.fixed_s == 0 and falling.experts_per_s > 0


def test_measured_rates_of_the_h200_machine_fit_to_its_row():
    """One missed expert took the CPU 89 µs, two 156."""
    cpu = fit_line([(1, 89e-6), (2, 156e-6)])
    machine = MACHINES["h200"]
    assert cpu.experts_per_s * BYTES == pytest.approx(machine.dram_bytes_per_s, rel=0.05)
    assert cpu.fixed_s == pytest.approx(machine.cpu_fixed_s, abs=10e-6)


def test_split_follows_the_rates_of_its_batch():
    slow_cpu = replace(FIGURES, batch=8, cpu=Line(100.0, 0.0))
    profile = replace(PROFILE, figures=(FIGURES, slow_cpu))
    assert profile.fetch_of(1, 8) == fetch_table(profile.rates(1), 8)
    assert len(profile.fetch_of(8, 8)) == 65
    assert profile.fetch_of(8, 8)[8] == 8 > profile.fetch_of(1, 8)[8]
    assert profile.at(2) == slow_cpu, "the nearest larger batch"
    assert profile.at(64) == slow_cpu


def test_without_a_link_or_without_a_cpu_the_other_computes_all():
    no_link = replace(PROFILE, figures=(replace(FIGURES, link=Line()),))
    no_cpu = replace(PROFILE, figures=(replace(FIGURES, cpu=Line()),))
    neither = replace(PROFILE, figures=(replace(FIGURES, cpu=Line(), link=Line()),))
    assert no_link.fetch_of(1, 3) == (0, 0, 0, 0)
    assert no_cpu.fetch_of(1, 3) == (0, 1, 2, 3)
    assert neither.fetch_of(1, 3) is None


def test_prompts_are_divided_by_the_same_rates():
    assert PROFILE.prompt_rates() is None, "tokens of one expert were not measured"
    rates = replace(PROFILE, cpu_row_s=2e-5).prompt_rates(1e-4)
    assert rates.link_s == pytest.approx(1 / 5393) and rates.cpu_s == pytest.approx(1 / 11740)
    assert rates.fixed_s == pytest.approx(137e-6) and rates.cpu_row_s == 2e-5
    assert prompt_share(rates, [1] * 30) == 20
    assert prompt_share(rates, [500] * 30) == 0


def test_the_simulator_gets_the_rates_that_were_measured():
    machine = PROFILE.machine("here")
    found, expected = machine.rates(BYTES), PROFILE.rates(1)
    for name in ("link_experts_per_s", "cpu_experts_per_s", "cpu_fixed_s", "link_fixed_s"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name))
    assert found.cpu_beside_link == pytest.approx(0.88)
    assert found.link_asked_s == expected.link_asked_s == 17e-6
    assert machine.hit_s(BYTES) == pytest.approx(1 / 350_000)
    assert machine.fixed_s(1) == pytest.approx(52e-6)
    assert machine.fixed_s(4) == pytest.approx(85e-6)


def test_a_machine_of_a_profile_without_link_still_simulates():
    no_link = replace(PROFILE, figures=(replace(FIGURES, link=Line(), hits=Line(), fixed_s=None),))
    machine = no_link.machine("cpu")
    assert machine.rates(BYTES).link_experts_per_s == 0 and machine.hit_s(BYTES) == 0


def test_json_comes_back_equal():
    assert from_json(to_json(PROFILE)) == PROFILE


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"figures": []},
        {"figures": "none"},
        {"key": None},
        {"expert_bytes": 0},
        {"handshake_s": float("nan")},
        {"read_bytes_per_s": "fast"},
        {"prefetch_bytes": [1]},
        {"prefetch_bytes": [0, 2**40]},
        {"prefetch_bytes": "far"},
    ],
)
def test_what_is_no_profile_is_refused(change):
    values = json.loads(to_json(PROFILE)) | change
    with pytest.raises(ValueError):
        from_json(json.dumps(values))


def test_a_share_or_a_rate_that_cannot_be_is_refused():
    for part, value in (
        ("link_beside_cpu", 0.0),
        ("cpu_beside_link", 1.5),
        ("batch", -1),
        ("link_asked_s", -1e-6),
    ):
        values = json.loads(to_json(PROFILE))
        values["figures"][0][part] = value
        with pytest.raises(ValueError):
            from_json(json.dumps(values))


def test_a_stored_profile_is_found_by_its_key_alone(tmp_path):
    store = ProfileStore(tmp_path / "profiles")
    assert store.find(KEY) is None
    path = store.save(PROFILE)
    assert store.find(KEY) == PROFILE
    for other in ("gpu", "cpu", "experts"):
        assert store.find(replace(KEY, **{other: "another"})) is None
    assert store.find(replace(KEY, threads=6)) is None
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing else is left behind"


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"{}", b"[1]", b'{"version": 1}'])
def test_a_damaged_or_foreign_file_is_left_out(tmp_path, damage):
    store = ProfileStore(tmp_path)
    path = store.save(PROFILE)
    path.write_bytes(damage)
    assert store.find(KEY) is None
    path.write_bytes(to_json(PROFILE).encode()[: len(to_json(PROFILE)) // 2])
    assert store.find(KEY) is None
    store.save(replace(PROFILE, key=replace(KEY, gpu="GPU-2"))).rename(path)
    assert store.find(KEY) is None, "a renamed file is not believed"


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    store = ProfileStore(tmp_path / "file" / "profiles")
    assert store.find(KEY) is None
    for refused in (store.prepare, lambda: store.save(PROFILE)):
        with pytest.raises(ConfigError, match="cannot be written"):
            refused()


def test_a_folder_is_tried_without_leaving_anything(tmp_path):
    store = ProfileStore(tmp_path / "a" / "b")
    store.prepare()
    assert list(store.folder.iterdir()) == []


def test_many_profiles_of_random_figures_survive_json():
    random = np.random.default_rng(0)
    for _ in range(20):
        a, b, c = random.uniform(1e-6, 1e6, 3).tolist()
        figures = Figures(2, Line(a, b), Line(c, a), Line(b, c), 0.5, 0.25, None, a)
        profile = replace(PROFILE, figures=(figures,), quick=True)
        assert from_json(to_json(profile)) == profile
