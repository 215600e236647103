"""The benchmark measures what it says, seen against a server whose times are known."""

from __future__ import annotations

import asyncio
import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "tools" / "bench_http.py"


@pytest.fixture(scope="module")
def bench():
    import sys

    spec = spec_from_file_location("bench_http", PATH)
    module = module_from_spec(spec)
    sys.modules["bench_http"] = module
    spec.loader.exec_module(module)
    return module


async def run_tool(*flags: str) -> tuple[int, str, str]:
    import sys

    process = await asyncio.create_subprocess_exec(
        sys.executable, PATH, *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_a_run_reports_lengths_and_times(front, endpoint):
    front.script("", "word " * 40, first_delay_s=0.05, delay_s=0.001)
    code, out, err = await run_tool(
        "--url", front.url, "--endpoint", endpoint, "--requests", "4", "--concurrency", "2",
        "--prompt-tokens", "300", "--output-tokens", "20", "--ignore-eos", "--json",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out)
    assert result["output_tokens"] == 20
    assert 0.85 * 300 < result["prompt_tokens"] < 1.15 * 300
    assert result["ttft_ms_p50"] >= 50  # the scripted prefill: a clock can only add to it
    assert result["itl_ms_p50"] > 0
    assert result["model"] == "test-model"
    assert {r.eos_ids for r in front.engine.requests} == {frozenset()}
    texts = [front.text.decode(r.prompt_ids) for r in front.engine.requests]
    assert len(set(texts)) == len(texts)


async def test_a_server_that_refuses_is_reported(front):
    code, out, err = await run_tool("--url", front.url, "--prompt-tokens", "100000")
    assert (code, out) == (1, "")
    assert "answered 400" in err


async def test_nobody_there_is_reported():
    code, _, err = await run_tool("--url", "http://127.0.0.1:1", "--model", "m")
    assert code == 1
    assert "Cannot connect" in err


def test_role_chunks_and_life_signs_are_no_tokens(bench):
    reply = bench.Reply(0.0)
    deltas = [{"role": "assistant", "content": ""}, {}, {"content": "a"}, {"content": "b"}]
    for second, delta in enumerate(deltas, 1):
        bench.read_event(reply, {"choices": [{"delta": delta}]}, float(second))
    assert reply.token_times_s == [3.0, 4.0]
    assert (reply.ttft_s, reply.gaps_s) == (3.0, [1.0])


def test_percentiles_are_values_that_were_seen(bench):
    values = [float(v) for v in range(1, 101)]
    assert [bench.percentile(values, p) for p in (50, 99, 100)] == [50, 99, 100]
    assert bench.percentile([7.0], 99) == 7.0
    assert bench.percentile([], 50) is None
