"""The table that the bench prints: measured over HTTP, kept as JSON, told beside its bars."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import bench
from bench_plot import plot, side_by_side
from bench_report import Line, Results, table
from bench_roofline import Rates, Weights, least_step_s, read_weights
from bench_rows import agreement
from full_table import told
from full_work import layers_that_fit
from make_synthetic import make

TOOL = Path(__file__).parents[2] / "tools" / "bench.py"
MORE = Line("a.decode", "decode", "tok/s", 100, 200)
LESS = Line("a.cold", "cold", "ms", 30, 20, "less")


def test_medians_stand_beside_bars_and_rows_without_values_are_left_out():
    results = Results(values={"a.decode": [90, 150, 160]})
    text = table((MORE, LESS), {"": results})
    assert "| decode | 150 tok/s | 90 to 160 | 3 | ≥ 100 reached | ≥ 200 missed |" in text
    assert "cold" not in text
    peer = Results(values={"a.cold": [40.0]})
    text = table((MORE, LESS), {"ftd": results, "peer": peer})
    assert "| cold |  | 40 ms (40 to 40, 1) |" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_a_cut_run_has_kept_what_it_measured(tmp_path):
    results = Results(tmp_path / "new" / "results.json")
    results.add("a.decode", [1.0])
    results.add("a.decode", [2.0])
    results.note("agreement", {"mean": 0.0})
    results.fail("a.cold", "the server went away")
    kept = Results.read(results.path)
    assert kept.values == {"a.decode": [1.0, 2.0]}
    assert kept.failed == {"a.cold": "the server went away"}
    assert sorted(p.name for p in results.path.parent.iterdir()) == ["results.json"]


def test_the_plot_is_an_image_of_every_row_with_a_bar():
    results = Results(values={"a.decode": [150], "a.cold": [40], "a.other": [1]})
    svg = ElementTree.fromstring(plot((MORE, LESS, Line("a.other", "<other>", "s")), results))
    widths = [float(e.get("width")) for e in svg.iter() if e.tag.endswith("rect")]
    assert len(widths) == 2
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01)  # 1.5 and 0.75 times their bars


def test_engines_stand_side_by_side_where_several_have_a_value():
    ours = Results(values={"a.decode": [90, 150, 160], "a.cold": [10.0]})
    peer = Results(values={"a.decode": [50.0]})
    text = side_by_side((MORE, LESS), {"ftd": ours, "<peer>": peer})
    svg = ElementTree.fromstring(text)
    widths = [float(e.get("width")) for e in svg.iter() if e.tag.endswith("rect")]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01) and len(widths) == 2
    assert "150 ftd" in text and "50 &lt;peer&gt;" in text and "cold" not in text


def test_agreement_compares_decoded_tokens_until_they_part():
    one = {"prompts": [[-1.0, -2.0]], "tokens": [["a", "b", "c"]], "greedy": [[-1.0, -1.0, -9.0]]}
    other = {"prompts": [[-1.0, -2.5]], "tokens": [["a", "b", "d"]], "greedy": [[-1.0, -1.1, -1.0]]}
    gaps = agreement(one, other, 0.25)
    assert (gaps["compared"], gaps["bitwise"], gaps["decoded_equal"], gaps["answers_parted"]) == (
        4, 2, 2, 1,
    )  # fmt: skip
    assert gaps["largest"] == 0.5
    assert gaps["far"] == 0.25


def test_the_roofline_counts_the_bytes_of_the_checkpoint(tmp_path):
    made = make(tmp_path, "tiny-qwen3.6", layers=2)
    weights = read_weights(tmp_path)
    assert (weights.num_experts, weights.experts_per_token) == (2 * made.experts, 2)
    assert weights.expert_bytes == 3 * 128 * 64 * 2  # a shared expert is none of them
    embedding = made.vocab * 128 * 2
    assert weights.dense_bytes == made.total_bytes - 32 * weights.expert_bytes - embedding
    weights = Weights(10.0, 100, 32, 2, 2, 512)
    rates = Rates(link=1.0, dram=3.0, hbm=50.0)
    assert least_step_s(weights, {"hits": 5, "misses": 2}, rates) == 20 / 4 + 150 / 50


def test_full_models_are_told_with_the_layers_they_have_and_a_prediction():
    results = Results(
        values={"gpt-oss-120b.16G.start": [9.0], "gpt-oss-120b.16G.decode": [80.0, 90.0]},
        facts={
            "gpt-oss-120b": {
                "layers": 3, "published_layers": 36, "experts": 128, "experts_per_token": 4,
            },
            "gpt-oss-120b.16G.slots": 380,
            "gpt-oss-120b.16G.step": {"hits": 9, "misses": 3, "on_cpu": 1, "step_s": 0.01},
            "gpt-oss-120b.16G.predicted": {"tokens_per_s": 101.6},
            "gpt-oss-120b.16G.phases": {"headers": 1.25, "weights": 3.0},
            "qwen3.6-bf16": {"layers": 40, "published_layers": 40, "experts": 256},
        },
        failed={"qwen3.6-bf16.8G": "left out: the limit of 540 s was reached"},
    )  # fmt: skip
    text = told(results)
    assert "| gpt-oss-120b mxfp4 | 3 of 36 | 16G | 380 of 384 | 85 (80 to 90) | 102 |" in text
    assert "| 75 % | 1.0 of 3.0 |" in text
    assert "| gpt-oss-120b.16G | 1.2 | 3.0 |" in text
    assert "**qwen3.6-bf16.8G**: left out" in text
    assert len({line.count("|") for line in text.split("\n\n")[0].splitlines()}) == 1


def test_a_model_has_as_many_layers_as_fit_in_memory_once():
    assert layers_that_fit(40, 1.5, 2.0, 100.0) == 40
    assert layers_that_fit(40, 1.5, 2.0, 34.0) == 20
    assert layers_that_fit(40, 100.0, 2.0, 100.0) == 1


async def test_full_models_are_measured_at_each_budget_and_over_a_reload(tmp_path):
    """One start for both budgets, another with fewer threads; on the CPU device, with tiny ones."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, TOOL.with_name("bench_full.py"), "--models", "trial",
        "--reload", "trial", "trial-oss", "--folder", tmp_path, "--out", tmp_path / "out",
        "--shorter", "40", "--prompt-tokens", "40", "--output-tokens", "16", "--repeats", "1",
        "--", "--device", "cpu",
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "HOLLOW_MEMORY": "1T"},
    )  # fmt: skip
    out, _ = await process.communicate()
    kept = Results.read(tmp_path / "out" / "results.json")
    assert not kept.failed, out.decode()
    names = ("decode", "roofline", "append64", "ttft2k", "ttft8k", "ttft32k")
    for budget in ("1M", "800K"):
        assert all(len(kept.values[f"trial.{budget}.{name}"]) == 1 for name in names)
        assert kept.facts[f"trial.{budget}.predicted"]["tokens_per_s"] > 0
    assert set(kept.values) > {"trial.1M.start", "trial.1M, 1 threads.start"}
    assert "trial.800K.start" not in kept.values
    assert kept.facts["trial.800K.slots"] < kept.facts["trial.1M.slots"]
    assert {"headers", "weights"} < set(kept.facts["trial.1M.phases"])
    reloaded = kept.facts["trial.reload"]
    assert reloaded["over"]["compared"] == reloaded["over"]["bitwise"] > 100
    assert reloaded["without"]["answers_parted"] == 0
    assert "1M, 1 threads" in (tmp_path / "out" / "table.md").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]  # what was written has gone


async def test_runs_beyond_the_time_limit_are_named(tmp_path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, TOOL.with_name("bench_full.py"), "--limit-s", "0", "--out", tmp_path,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 1
    failed = Results.read(tmp_path / "results.json").failed
    assert set(failed) == {"qwen3.6-bf16", "qwen3.6-nvfp4", "qwen3.6-fp8", "gpt-oss-120b"}
    assert "left out: the limit of 0 s was reached" in out.decode()


def test_runs_without_a_bar_are_held_to_the_simulators_best_policy():
    step = {"hits": 118, "misses": 10, "fetched": 6, "on_cpu": 4, "fill_bytes": 1, "step_s": 1e-3}
    shape = {"layers": 4, "experts": 256, "top_k": 8, "expert_bytes": 9437184}
    results = Results(
        conditions={"shape": shape},
        values={"threads.decode": [10.0], "offloaded.decode": [1e6]},
        facts={f"{run}.step": {**step, "slots": 95} for run in ("threads", "offloaded")},
    )
    text = bench.report(results, "h200")
    assert "| decode, 6 CPU threads | 10 tok/s | 10 to 10 | 1 | ≥ " in text
    assert "missed" in text and "≥ 325 reached" in text  # a bar of its own stays
    assert "| offloaded | 1000000 tok/s |" in text


async def test_any_server_is_measured_by_its_url(front, tmp_path):
    front.script("", "word " * 7000, delay_s=0.002)
    process = await asyncio.create_subprocess_exec(
        sys.executable, TOOL, "--url", front.url, "--vocab", "200", "--quick",
        "--only", "decode", "streams", "cold", "append20", "beside", "--out", tmp_path,
        "--prompt-tokens", "20", "--output-tokens", "16", "--long-prompt", "30",
        "--beside-prompt", "40",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    kept = json.loads((tmp_path / "results.json").read_text())
    assert not kept["failed"]
    assert {key: len(values) for key, values in kept["values"].items()} == {
        "url.decode": 2, "url.streams": 1, "url.cold": 2, "url.append20": 2, "url.long": 1,
        "url.kept": 1, "url.slower": 1,
    }  # fmt: skip
    assert "| decode, 1 stream |" in out.decode()
    assert process.returncode == 0


async def test_a_bench_that_is_ended_tells_what_it_has_measured(front, tmp_path):
    front.script("", "word " * 7000, delay_s=0.002)
    process = await asyncio.create_subprocess_exec(
        sys.executable, TOOL, "--url", front.url, "--vocab", "200", "--out", tmp_path,
        "--prompt-tokens", "20", "--output-tokens", "16", "--long-prompt", "30", "--repeats", "900",
        "--only", "cold", "decode",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        while not front.engine.requests:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.02)
    process.terminate()
    out, _ = await process.communicate()
    assert "**bench**: interrupted" in out.decode()
    assert Results.read(tmp_path / "results.json").failed == {"bench": "interrupted"}
