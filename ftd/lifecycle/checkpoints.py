"""``Models`` on real checkpoints: files found, headers checked, weights read, an engine started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ftd.check import plan_findings, text_findings
from ftd.checkpoint.headers import read_config
from ftd.checkpoint.source import ModelSource, resolve
from ftd.config import Config
from ftd.engine.loading import load_engine
from ftd.engine.preparing import Prepared, prepare
from ftd.errors import BudgetExceeded
from ftd.lifecycle.elastic import ElasticMemory
from ftd.lifecycle.served import Loaded, Preflight
from ftd.lifecycle.succession import (
    Capacity,
    Footprint,
    available_after,
    available_beside,
    fits_beside,
)
from ftd.memory.machine import Machine, read_machine
from ftd.memory.plan import MemoryPlan
from ftd.model.registry import architecture_for
from ftd.text.textmodel import TextModel


class Checkpoints:
    """See ``ftd.lifecycle.served.Models``."""

    def resolve(self, model: str, progress: Callable[[int, int], None]) -> ModelSource:
        return resolve(model, progress=progress, accept=_accept)

    def check(self, config: Config, source: ModelSource, old: Footprint | None) -> Preflight:
        machine = read_machine()
        beside = None
        if old is None:
            prepared = prepare(source.path, config, machine)
        else:
            after = _with(machine, available_after, old)
            prepared = prepare(source.path, config, after, replacing=True)
            beside = _prepare_beside(source.path, config, _with(machine, available_beside, old))
        fits = fits_beside(_capacity(beside.plan) if beside else None, _capacity(prepared.plan))
        chosen = beside if beside and fits else prepared
        return Preflight(
            beside=fits,
            need_bytes=chosen.plan.total_bytes,
            available_bytes=chosen.plan.available_bytes,
            report=partial(_report, chosen),
            prepared=chosen,
            vocab=chosen.spec.vocab,
        )

    def open_text(self, source: ModelSource) -> TextModel:
        return TextModel(source.path)

    def load(
        self,
        config: Config,
        preflight: Preflight,
        progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
    ) -> Loaded:
        loaded = load_engine(config, preflight.prepared, progress, cancelled)
        return Loaded(loaded.handle, ElasticMemory(config, preflight.prepared, loaded))


def _accept(path: Path) -> None:
    """Refuse a model that could not be served before its weights are downloaded."""
    config = read_config(path)
    architecture_for(config).spec(config, {})
    TextModel(path)


def _with(machine: Machine, available: Callable[[int, Footprint], int], old: Footprint) -> Machine:
    return replace(machine, available_bytes=available(machine.available_bytes, old))


def _prepare_beside(path: Path, config: Config, machine: Machine) -> Prepared | None:
    try:
        return prepare(path, config, machine)
    except BudgetExceeded:
        return None


def _capacity(plan: MemoryPlan) -> Capacity:
    return Capacity(plan.context_tokens, plan.kv_tokens, plan.num_slots)


def _report(prepared: Prepared) -> tuple[str, ...]:
    findings = [
        *plan_findings(prepared.spec, prepared.plan),
        *text_findings(prepared.checkpoint.path),
    ]
    lines = [*prepared.plan.table().splitlines(), *(str(finding) for finding in findings)]
    return tuple(line for part in lines for line in part.splitlines())
