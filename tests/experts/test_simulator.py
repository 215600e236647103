"""The simulator where the answer is known, and the bar that the default policy must clear."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from ftd.experts.costs import Pace, StepTimes
from ftd.experts.machines import MACHINES, PARTS
from ftd.experts.profile import Figures, Key, Line, Profile, to_json
from ftd.experts.simulator import (
    CONTENDERS,
    RIVALS,
    Default,
    LeastRecent,
    compare,
    simulate,
    steps_of,
    synthetic_routing,
)

HERE = Path(__file__).parent
EXPERT_BYTES = 3 * 2048 * 768 * 2
BUDGETS = (10, 37, 60, 90)


def recorded() -> np.ndarray:
    """[steps, 6, 32] bool: 1000 tokens of a trained model with 32 experts that writes code."""
    return steps_of(np.load(HERE / "routing_code.npy"), 32, 1)


def synthetic() -> np.ndarray:
    return steps_of(synthetic_routing(500, 6, 64, 6), 64, 1)


@pytest.fixture(scope="module")
def workloads() -> dict[str, np.ndarray]:
    return {"recorded": recorded(), "synthetic": synthetic()}


def against_rivals(used: np.ndarray, machine: str, budget: int, batch: int = 1) -> float:
    """The default's speed, as a multiple of the better of its rivals'."""
    speed = {
        outcome.policy: outcome.tokens_per_s
        for outcome in compare(
            used,
            MACHINES[machine],
            ("default", *RIVALS),
            num_slots=budget * used[0].size // 100,
            expert_bytes=EXPERT_BYTES,
            batch=batch,
        )
    }
    return speed["default"] / max(speed[name] for name in RIVALS)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("workload", ["recorded", "synthetic"])
def test_default_policy_loses_to_neither_rival_on_any_machine(workloads, workload, budget):
    used = workloads[workload]
    stands = {machine: against_rivals(used, machine, budget) for machine in MACHINES}
    assert min(stands.values()) >= 0.99, stands


@pytest.mark.parametrize("machine", ["4060-laptop", "4090", "5090-server"])
def test_default_policy_loses_to_neither_rival_where_hits_take_longest(machine):
    """Eight rows: the GPU's own memory is the slowest part, and misses cost next to nothing.

    Seeds differ by half a percent either way.
    """
    used = steps_of(synthetic_routing(1600, 6, 256, 8, seed=8), 256, 8)
    stands = {budget: against_rivals(used, machine, budget, batch=8) for budget in BUDGETS}
    assert min(stands.values()) >= 0.99, stands


def test_default_policy_follows_a_change_of_text_nearly_as_fast_as_an_lru():
    """All at once other experts are popular, and little else is counted: an LRU's best case."""
    parts = [synthetic_routing(250, 6, 64, 6, seed=seed) for seed in (1, 2)]
    used = steps_of(np.concatenate(parts), 64, 1)
    assert against_rivals(used, "5090-desktop", 60) > 0.92
    assert against_rivals(used, "5090-desktop", 37) > 1.1


@pytest.mark.parametrize(
    ("policy", "machine", "streams", "resident_share", "measured_tokens_per_s"),
    [
        ("default", "h200", 1, 0.37, 630),
        ("default", "h200", 4, 0.37, 1000),
        ("default", "h200-6-threads", 1, 0.37, 488),
        ("link-only", "h200", 1, 0.37, 385),
        ("link-only", "h200", 4, 0.37, 540),
        ("default", "h200", 1, 1.0, 1039),
        ("default", "h200", 4, 1.0, 1830),
    ],
)
def test_prediction_agrees_with_the_measured_rate(
    policy, machine, streams, resident_share, measured_tokens_per_s
):
    """The H200 machine, the checkpoint of tools/make_synthetic.py, over HTTP."""
    predicted = []
    for seed in range(2):
        routing = synthetic_routing(300 * streams, 16, 128, 8, skew=1.0, seed=seed)
        used = steps_of(routing, 128, streams)
        outcome = simulate(
            used,
            policy,
            MACHINES[machine],
            num_slots=int(resident_share * used[0].size),
            expert_bytes=EXPERT_BYTES,
            batch=streams,
        )
        predicted.append(outcome.tokens_per_s)
    assert np.mean(predicted) == pytest.approx(measured_tokens_per_s, rel=0.2)


def test_every_contender_that_divides_by_rates_is_made_with_the_parts():
    """Without slots each step misses one expert of a layer, and both compute it."""
    used = np.ones((20, 2, 1), bool)
    machine, args = MACHINES["h200"], {"num_slots": 0, "expert_bytes": EXPERT_BYTES}
    for name in ("default", "oracle"):
        outcome = simulate(used, name, machine, **args)
        assert 0 < outcome.link_bytes_per_token < 2 * EXPERT_BYTES, name
    assert simulate(used, "link-only", machine, **args).cpu_bytes_per_token == 0


def test_no_policy_beats_the_oracle_by_its_misses(workloads):
    for used in workloads.values():
        outcomes = list(
            compare(used, MACHINES["h200"], num_slots=used[0].size // 3, expert_bytes=EXPERT_BYTES)
        )
        bound = outcomes[-1]
        assert [o.policy for o in outcomes] == list(CONTENDERS) and bound.policy == "oracle"
        assert all(o.miss_share >= bound.miss_share for o in outcomes[:-1])


def test_a_policy_that_never_admits_starves():
    """The router moves on; the experts that were first in the slots do not."""
    used = steps_of(synthetic_routing(600, 4, 64, 6, drift=0.06), 64, 1)
    args = {"machine": MACHINES["pro-6000"], "num_slots": 96, "expert_bytes": EXPERT_BYTES}
    still = simulate(used, "cpu-all", **args)
    assert simulate(used, "default", **args).miss_share < 0.7 * still.miss_share


@pytest.mark.parametrize("name", CONTENDERS)
@pytest.mark.parametrize("slots", [0, 1, 100, 384])
def test_any_number_of_slots_runs_and_is_never_exceeded(name, slots):
    used = steps_of(synthetic_routing(60, 6, 64, 6), 64, 2)
    rates = MACHINES["h200"].rates(EXPERT_BYTES)
    contender = CONTENDERS[name](used, slots, rates, PARTS)
    for now in used:
        served = contender.serve(now, Pace())
        assert contender.resident.sum() <= slots
        assert (served.on_link <= now.sum(1)).all()


def test_without_slots_every_use_is_a_miss_and_bytes_say_so():
    used = synthetic()
    machine = MACHINES["4090"]
    for name in ("default", "cpu-all"):
        outcome = simulate(used, name, machine, num_slots=0, expert_bytes=EXPERT_BYTES)
        total = outcome.link_bytes_per_token + outcome.cpu_bytes_per_token
        assert outcome.miss_share == 1
        assert total == pytest.approx(6 * 6 * EXPERT_BYTES)
    assert outcome.link_bytes_per_token == 0


def test_lru_keeps_the_most_recent():
    """Six experts in turn through three slots: LRU never hits, through six always."""
    turns = np.zeros((60, 1, 6), bool)
    turns[np.arange(60), 0, np.arange(60) % 6] = True
    machine, args = MACHINES["h200"], {"expert_bytes": EXPERT_BYTES}
    assert simulate(turns, "lru-fetch-all", machine, num_slots=3, **args).miss_share == 1
    assert simulate(turns, "lru-fetch-all", machine, num_slots=6, **args).miss_share == 0
    assert simulate(turns, "oracle", machine, num_slots=3, **args).miss_share < 0.7


def test_fixed_split_carries_its_halves_on():
    used = np.ones((100, 1, 1), bool)
    policy = LeastRecent(used, 0, 0.3)
    assert sum(int(policy.serve(now, Pace()).on_link.sum()) for now in used) == 30


def test_default_begins_with_full_slots_and_keeps_them_filled():
    used = synthetic()
    policy = Default(used, 200, MACHINES["h200"].rates(EXPERT_BYTES))
    assert policy.resident.sum() == 200
    assert np.ptp(policy.resident.sum(1)) <= 1  # evenly over the layers
    pace = Pace().after(StepTimes(1e-2, saved_s=1e-4, misses=1))
    for now in used:
        policy.serve(now, pace)
    assert policy.resident.sum() >= 190


def test_misses_hidden_behind_the_hits_are_not_worth_a_fill():
    """Where the GPU's own memory is the slowest part, the CPU computes beside it for nothing.

    A policy that keeps slots empty there gives the CPU still more, and wins by so little.
    """
    used = steps_of(synthetic_routing(1200, 6, 64, 6), 64, 4)
    machine, args = MACHINES["4060-laptop"], {"expert_bytes": EXPERT_BYTES, "batch": 4}
    slots = used[0].size * 9 // 10
    speed = {
        name: simulate(used, name, machine, num_slots=slots, **args).tokens_per_s
        for name in ("default", "fixed-split", "link-only")
    }
    assert speed["default"] >= 0.99 * max(speed.values()), speed


def test_synthetic_routing_has_the_published_skew():
    """Skew 1 and 37 % of the experts: a global LRU misses about 15 % of its reads.

    The popularities drawn move that by a point or two.
    """
    misses = []
    for seed in range(3):
        used = steps_of(synthetic_routing(500, 12, 128, 8, seed=seed), 128, 1)
        outcome = simulate(
            used,
            "lru-fetch-all",
            MACHINES["h200"],
            num_slots=568,
            expert_bytes=EXPERT_BYTES,
            warm_up=0.5,
        )
        misses.append(outcome.miss_share)
    assert np.mean(misses) == pytest.approx(0.15, abs=0.025)


def test_tool_prints_a_row_for_each_policy_and_draws_them(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("simulate", HERE.parents[1] / "tools/simulate.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    svg = tmp_path / "speed.svg"
    tool.main([
        "--trace", str(HERE / "routing_code.npy"), "--experts", "32", "--tokens", "80",
        "--machine", "h200", "4090", "--budget", "37", "--plot", str(svg),
    ])  # fmt: skip
    rows = [line for line in capsys.readouterr().out.splitlines() if "37 %" in line]
    assert len(rows) == 2 * len(CONTENDERS)
    assert svg.read_text().count("<rect") == len(rows)
    tool.main([
        "--trace", str(HERE / "routing_code.npy"), "--experts", "32", "--tokens", "80",
        "--machine", "h200", "4090", "--budget", "37", "60", "--lost",
    ])  # fmt: skip
    assert "4 configurations, lost in " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="the model has 8"):
        tool.main(["--trace", str(HERE / "routing_code.npy"), "--experts", "8"])
    figures = Figures(1, Line(5400.0, 3e-6), Line(11_700.0, 4e-5), Line(350_000.0), 0.97, 0.88)
    key = Key("GPU-1", "a processor", 14, "bf16 2048x768")
    measured = tmp_path / "measured.json"
    measured.write_text(to_json(Profile(key, EXPERT_BYTES, (figures,))))
    common = ["--trace", str(HERE / "routing_code.npy"), "--experts", "32", "--tokens", "80"]
    tool.main([*common, "--profile", str(measured)])
    rows = [line for line in capsys.readouterr().out.splitlines() if "37 %" in line]
    assert len(rows) == len(CONTENDERS) and all("| measured |" in row for row in rows)
    measured.write_text("{}")
    with pytest.raises(SystemExit, match="not a profile"):
        tool.main([*common, "--profile", str(measured)])
