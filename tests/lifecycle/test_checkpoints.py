"""The lifecycle on the bundled demo model: real headers, weights, engine and steps."""

import dataclasses

import pytest

from ftd.config import Config
from ftd.engine.api import EngineRequest, Finish
from ftd.errors import BudgetExceeded, ModelNotFound, UnsupportedModel
from ftd.lifecycle import Lifecycle
from ftd.lifecycle import checkpoints as real
from ftd.lifecycle.checkpoints import Checkpoints
from ftd.lifecycle.succession import Footprint
from ftd.memory.machine import read_machine
from ftd.units import GiB, MiB

CONFIG = Config(model="demo", kv_tokens=4096, context=1024)
SMALL = Footprint(resident_bytes=22 * MiB, growth_bytes=100 * MiB)


@pytest.fixture
def available(monkeypatch):
    """Sets what the machine has free."""

    def set_to(num_bytes):
        machine = dataclasses.replace(read_machine(), available_bytes=num_bytes)
        monkeypatch.setattr(real, "read_machine", lambda: machine)

    set_to(8 * GiB)
    return set_to


def check(old=None, config=CONFIG):
    models = Checkpoints()
    return models.check(config, models.resolve("demo", lambda done, total: None), old)


def test_check_reports_the_plan(available):
    found = check()
    assert found.available_bytes == 8 * GiB
    assert any(line.startswith("host pool") for line in found.report())
    assert not found.beside, "there is nothing to be beside of"


def test_beside_if_both_fit(available):
    found = check(SMALL)
    assert found.beside
    assert found.available_bytes == 8 * GiB - SMALL.growth_bytes


def test_after_if_the_old_one_needs_what_is_free(available):
    found = check(Footprint(resident_bytes=3 * GiB, growth_bytes=8 * GiB))
    assert not found.beside
    assert found.available_bytes == 11 * GiB, "it will be freed first"


def test_after_rather_than_with_a_smaller_pool(available):
    sized_by_memory = dataclasses.replace(CONFIG, kv_tokens="auto", context="auto")
    available(400 * MiB)
    old = Footprint(resident_bytes=4 * GiB, growth_bytes=40 * MiB)
    assert not check(old, sized_by_memory).beside


def test_refused_if_it_would_not_fit_even_then(available):
    available(100 * MiB)
    with pytest.raises(BudgetExceeded, match=r"122 MiB is available"):
        check(SMALL)


def test_hub_models_are_refused_before_their_weights_are_fetched(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UnsupportedModel, match="mamba"):
        real._accept(tmp_path)


async def generate(lifecycle, request_id):
    ticket = lifecycle.current().engine.submit(EngineRequest(request_id, (1, 2, 3), max_tokens=4))
    return [output async for output in ticket][-1].finish


@pytest.mark.parametrize("free_bytes", [8 * GiB, 420 * MiB], ids=["beside", "after"])
async def test_load_serve_reload_stop(available, free_bytes):
    available(free_bytes)
    lifecycle = Lifecycle(CONFIG, Checkpoints())
    await lifecycle.load()
    served = lifecycle.current()
    assert (served.name, served.limits.context_tokens) == ("demo", 1024)
    assert await generate(lifecycle, "first") in (Finish.LENGTH, Finish.EOS)
    with pytest.raises(ModelNotFound):
        await lifecycle.reload("/nowhere")
    assert lifecycle.current() is served
    if free_bytes < GiB:
        served = None
        memory = lifecycle.current().memory
        memory._plan = dataclasses.replace(memory.plan, kv_bytes=400 * MiB)
        del memory
    done = await lifecycle.reload()
    assert done.beside is (free_bytes > GiB)
    assert await generate(lifecycle, "second") in (Finish.LENGTH, Finish.EOS)
    await lifecycle.stop(1.0)
