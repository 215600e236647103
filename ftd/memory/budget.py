"""What a budget asked for while serving means: new settings and a plan for them, or a refusal.

Pure. A refusal names a number that works: it is found by asking the plan again and again, so it
holds whatever the plan's reasons are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from ftd.config import Config, flag
from ftd.errors import BudgetExceeded, ConfigError, FtdError
from ftd.memory.change import Change
from ftd.memory.plan import MemoryPlan
from ftd.units import Amount, MiB, format_count

Planner = Callable[[Config], MemoryPlan]

SEARCHED_MIB = 256  # in one piece, from below
LEAST_TOKENS = 16  # of a pool that may be asked for


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the loaded model allows, whatever the budget."""

    longest_tokens: int  # of the requests under way
    most_vram_bytes: int  # there are no more, in whatever --vram counts
    most_pages: int  # address space was reserved for so many
    most_context_tokens: int  # captured steps have page tables for so many; the model's own limit


def settings_for(config: Config, change: Change, plan: MemoryPlan) -> Config:
    """The settings in force with a change.

    Raises:
        ConfigError: parts of it contradict each other.
    """
    if change.auto and (change.kv_tokens is not None or change.expert_slots is not None):
        raise ConfigError(
            "--auto divides the budget by need; --kv-tokens and --expert-slots give numbers",
            hint="give either --auto, or numbers",
        )
    new: dict[str, object] = {}
    if isinstance(change.vram, Amount):
        new["vram"] = change.vram
    if change.kv_tokens is not None:
        new["kv_tokens"] = change.kv_tokens
    if change.expert_slots is not None:
        new["expert_slots"] = change.expert_slots
    if change.auto:
        new |= {"kv_tokens": "auto", "expert_slots": "auto"}
        if config.vram is None and "vram" not in new and plan.vram is None:
            new["vram"] = Amount(bytes=plan.kv_bytes + plan.slots_bytes)
    origin = {name: where for name, where in config.origin.items() if name not in new}
    return replace(config, **new, origin=origin)  # type: ignore[arg-type]


def plan_change(planner: Planner, config: Config, bounds: Bounds) -> MemoryPlan:
    """The plan for new settings of a model that is loaded.

    Raises:
        BudgetExceeded, ConfigError: nothing fits; the hint has a number that works.
    """
    try:
        return _plan(planner, config, bounds)
    except (BudgetExceeded, ConfigError) as refusal:
        _refuse(planner, config, bounds, refusal)


def least_budget(planner: Planner, config: Config, bounds: Bounds, above: int) -> int | None:
    """The smallest ``--vram`` above so many bytes that works, to a MiB; None: none does."""

    def works(megabytes: int) -> bool:
        try:
            _plan(planner, replace(config, vram=Amount(bytes=megabytes * MiB)), bounds)
        except FtdError:
            return False
        return True

    # upwards: what is free now may be less than the most
    low, most = above // MiB, bounds.most_vram_bytes // MiB
    while low < most and not works(high := min(low + SEARCHED_MIB, most)):
        low = high
    found = _first(works, low, min(low + SEARCHED_MIB, most))
    return None if found is None else found * MiB


def _plan(planner: Planner, config: Config, bounds: Bounds) -> MemoryPlan:
    plan = planner(config)
    pool = f"the KV pool would hold {format_count(plan.kv_tokens)}"
    if plan.kv_tokens <= bounds.longest_tokens:
        raise BudgetExceeded(
            f"a request under way has {format_count(bounds.longest_tokens)} tokens, {pool}",
            hint="wait until it has ended",
        )
    if config.context != "auto" and plan.kv_tokens < config.context:
        raise BudgetExceeded(
            f"ftd was started with --context {config.context}, {pool} tokens",
            hint="start ftd again with a smaller --context",
        )
    if plan.num_pages > bounds.most_pages:
        most = bounds.most_pages * plan.page_tokens
        raise BudgetExceeded(
            f"{format_count(plan.kv_tokens)} tokens of KV, address space is reserved for "
            f"{format_count(most)}",
            hint=f"use {flag('kv_tokens')} {most} or less",
        )
    return replace(plan, context_tokens=min(plan.context_tokens, bounds.most_context_tokens))


def _refuse(planner: Planner, config: Config, bounds: Bounds, refusal: FtdError) -> NoReturn:
    """Say the same with numbers that work, where there are any."""

    def works(**settings: object) -> bool:
        try:
            _plan(planner, replace(config, **settings), bounds)  # type: ignore[arg-type]
        except FtdError:
            return False
        return True

    def budget(megabytes: int) -> bool:
        return works(vram=Amount(bytes=megabytes * MiB))

    found = []
    if isinstance(config.vram, Amount):
        asked = (config.vram.bytes or 0) // MiB
        least = _first(budget, asked, bounds.most_vram_bytes // MiB)
        if least is not None:
            found.append(f"{flag('vram')} {least}M or more")
    if isinstance(config.kv_tokens, int):
        low = max(LEAST_TOKENS, bounds.longest_tokens + 1)
        low = low if config.context == "auto" else max(low, config.context)
        if low > config.kv_tokens:
            found += [f"{flag('kv_tokens')} {low} or more"] if works(kv_tokens=low) else []
        elif most := _last(lambda n: works(kv_tokens=n), low, config.kv_tokens):
            found.append(f"{flag('kv_tokens')} {most} or less")
    if isinstance(config.expert_slots, int):
        slots = _last(lambda n: works(expert_slots=n), 0, config.expert_slots)
        words = f"{flag('expert_slots')} {slots}" + (" or less" if slots else "")
        found += [] if slots is None else [words]
    if isinstance(config.context, int):
        context = _last(lambda n: works(context=n), LEAST_TOKENS, config.context)
        found += [f"ftd {flag('context')} {context} or less"] if context else []
    if not found:
        raise refusal
    raise type(refusal)(refusal.message, hint="what works: " + "; ".join(found)) from refusal


def _first(works: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest number above ``low`` that works, if ``high`` does."""
    if high <= low or not works(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def _last(works: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number below ``high`` that works, if ``low`` does."""
    if low >= high or not works(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low
