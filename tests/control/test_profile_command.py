"""``ftctl profile`` over a real engine thread, and the table that people see."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ftctl import view
from ftd.cli import main
from ftd.config import load_config
from ftd.control import lines
from ftd.control import protocol as p
from ftd.control.commands import LifecycleCommands
from ftd.control.profile_table import profile_lines
from ftd.engine.api import EngineRequest, Sampling
from ftd.errors import Busy, ConfigError
from ftd.experts.measure import Effort
from ftd.lifecycle import Lifecycle
from ftd.lifecycle.checkpoints import Checkpoints

SHORT = Effort((1, 2), (1, 2), rounds=1, slice_s=0.005)
ROW = p.ProfileRow(
    1, 50.9e9, 3e-6, 110e9, 37e-6, 0.97, 0.88, 3300e9, 52e-6, (0, 0, 1, 1, 1, 2, 2, 2, 3)
)
RESULT = p.ProfileResult(
    "m", "GPU-1", "a GPU", "a processor", 14, "bf16 2048x768", 9 << 20,
    (ROW, replace(ROW, batch=8)), 137e9, 4.7e-6, "/cache/profile.json", 6.2, 0.061,
)  # fmt: skip


@asynccontextmanager
async def served(model, folder, **settings):
    flags = {"model": str(model), "device": "cpu", "profile_dir": str(folder), **settings}
    lifecycle = Lifecycle(load_config(flags, {}), Checkpoints())
    await lifecycle.load()
    try:
        yield lifecycle, LifecycleCommands(lifecycle, stop=lambda: None)
    finally:
        await lifecycle.stop(0.0)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("ftd.engine.profiling.FULL", SHORT)


async def test_requests_go_on_while_the_machine_is_measured(script_model_dir, tmp_path):
    async with served(script_model_dir, tmp_path) as (lifecycle, commands):
        engine = lifecycle.current().engine
        request = EngineRequest("r", tuple(range(5, 15)), 200, Sampling(temperature=0.0))
        ticket = engine.submit(request)
        seen = []

        async def look():
            while True:
                progress = commands.progress()
                if progress.fraction is not None:
                    seen.append((progress.phase, progress.fraction, engine.status().output_tokens))
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        result = await commands.run(p.Profile())
        looking.cancel()
        ticket.end()
        assert commands.progress().fraction is None, "it is over"
        fractions = [fraction for _, fraction, _ in seen]
        assert fractions == sorted(fractions) and 0 < fractions[0] <= fractions[-1] <= 1
        assert len({tokens for _, _, tokens in seen}) > 1, "tokens came meanwhile"
        status = await commands.run(p.Status())
        assert status.engine.rates_from.startswith("the profile of ") and status.progress is None
    assert [row.batch for row in result.rows] == [1, 2]
    assert all(row.cpu_bytes_per_s > 0 and row.link_bytes_per_s == 0 for row in result.rows)
    assert Path(result.path).is_file() and Path(result.path).parent == tmp_path
    assert result.took_s > 0 and result.longest_pause_s > 0
    assert result.gpu == "" and result.threads >= 1
    assert lines.build(p.ProfileResult, lines.decode_object(lines.encode(result))) == result
    async with served(script_model_dir, tmp_path) as (_, commands):
        status = (await commands.run(p.Status())).engine
        assert status.rates_from.startswith("the profile of "), "found at the next start"


async def test_one_measurement_at_a_time_and_one_that_is_given_up(script_model_dir, tmp_path):
    async with served(script_model_dir, tmp_path) as (_, commands):
        first = asyncio.create_task(commands.run(p.Profile()))
        while commands.progress().fraction is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        shown = (await commands.run(p.Status())).progress
        assert shown.phase == "measuring the machine" and shown.fraction > 0
        with pytest.raises(Busy, match="under way"):
            await commands.run(p.Profile())
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert commands.progress().fraction is None
        assert not list(tmp_path.iterdir()), "nothing is kept"
        assert (await commands.run(p.Profile())).rows


async def test_a_folder_that_cannot_be_is_refused(script_model_dir, tmp_path):
    (tmp_path / "file").write_text("")
    async with served(script_model_dir, tmp_path / "file" / "x") as (_, commands):
        with pytest.raises(ConfigError, match="cannot be written"):
            await commands.run(p.Profile())


def test_ftd_profile_prints_the_table_and_ends(
    script_model_dir, tmp_path, monkeypatch, log_as_before
):
    monkeypatch.setattr("ftd.cli._leave", lambda code: code)
    flags = ["--model", script_model_dir, "--device", "cpu", "--profile-dir", tmp_path]
    done = CliRunner().invoke(main, ["--profile", *map(str, flags)])
    assert done.exit_code == 0, done.output
    assert "GB/s" in done.stdout and "kept in" in done.stdout and len(list(tmp_path.iterdir())) == 1


def test_the_table_of_a_gpu_has_everything():
    lines = "\n".join(profile_lines(RESULT))
    for part in (
        "50.9 GB/s + 3 us", "110.0 GB/s + 37 us", "49.4 GB/s", "96.8 GB/s", "3300 GB/s", "52 us",
        "0 1 1 1 2 2 2 3", "handshake  5 us", "a GPU (GPU-1) and a processor, 14 threads",
        "9.00 MiB each", "longest pause 61 ms",
    ):  # fmt: skip
        assert part in lines, part
    heads, *rows = lines.splitlines()[4:7]
    assert heads.index("slots") == rows[0].index("3300") == rows[1].index("3300")


def test_the_table_of_a_cpu_leaves_out_what_it_has_not():
    row = replace(ROW, link_bytes_per_s=0.0, slots_bytes_per_s=0.0, layer_fixed_s=None)
    lines = profile_lines(replace(RESULT, gpu="", rows=(row,), longest_pause_s=0.0))
    text = "\n".join(lines)
    for part in ("link", "slots", "handshake", "misses", "pause"):
        assert part not in text, part
    assert "110.0 GB/s + 37 us" in text


def test_a_bar_shows_what_bytes_do_not_measure():
    line = view.progress(p.Progress("measuring the machine", fraction=0.25), 60)
    assert line.startswith("measuring the machine [") and "25%" in line and len(line) < 60
