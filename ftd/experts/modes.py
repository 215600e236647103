"""Whether misses are divided, or all take the link: decided by what steps took. Pure.

The split is computed from rates that were measured alone, and a machine may behave otherwise while
it serves. So one of two modes is in force, and now and then the other is tried for a while; it is
kept if it was clearly faster than the mode before and after the trial, and given up early if it is
clearly slower. Each trial that changes nothing doubles the time to the next, so trials cost next to
nothing where the choice is right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Mode(StrEnum):
    SPLIT = "split"  # as the profile says
    LINK = "link"  # every miss

    @property
    def other(self) -> Mode:
        return Mode.LINK if self is Mode.SPLIT else Mode.SPLIT


@dataclass(frozen=True, slots=True)
class Tuning:
    settle_steps: int = 6  # after a change: fills and evictions follow the new mode
    window_steps: int = 96  # that are averaged
    least_trial_steps: int = 8  # before a trial is given up
    give_up: float = 0.1  # if it is so much slower
    first_trial_windows: int = 12  # so many in one mode before the other is tried
    most_trial_windows: int = 512
    margin: float = 0.04  # a mode must be so much faster: averages of windows are noisy


@dataclass(frozen=True, slots=True)
class Average:
    steps: int = 0
    seconds: float = 0.0

    def plus(self, seconds: float) -> Average:
        return Average(self.steps + 1, self.seconds + seconds)

    @property
    def step_s(self) -> float:
        return self.seconds / max(1, self.steps)


@dataclass(frozen=True, slots=True)
class State:
    """Of one batch size.

    Args:
        settled: the mode that is thought faster; another one in force is on trial.
        split_s, link_s: what a step took in each mode's last window; 0: not known.
    """

    mode: Mode = Mode.SPLIT  # in force
    settled: Mode = Mode.SPLIT
    settling: int = 0  # steps that are not counted any more
    window: Average = Average()
    before_s: float = 0.0  # a step of the settled mode before the trial
    trial_s: float = 0.0  # a step of the trial that is over; 0: none is
    windows: int = 0  # in the settled mode since the last trial
    wait_windows: int = 0  # until the next one; 0: as tuned
    split_s: float = 0.0
    link_s: float = 0.0

    @property
    def on_trial(self) -> bool:
        return self.mode is not self.settled


def after_step(state: State, tuning: Tuning, seconds: float, misses: int) -> State:
    """``mode`` of what it returns is for the next step.

    Args:
        seconds: what a decode step took, host and device together.
        misses: it had; without any it tells nothing of either mode.
    """
    if not misses or seconds <= 0:
        return state
    if state.settling:
        return replace(state, settling=state.settling - 1)
    state = replace(state, window=state.window.plus(seconds))
    if state.on_trial and _is_hopeless(state, tuning):
        back = replace(state, mode=state.settled, settling=tuning.settle_steps, window=Average())
        return _wait_longer(back, tuning)
    if state.window.steps < tuning.window_steps:
        return state
    return _after_window(state, tuning)


def _is_hopeless(state: State, tuning: Tuning) -> bool:
    window = state.window
    slower = window.step_s > state.before_s * (1 + tuning.give_up)
    return window.steps >= tuning.least_trial_steps and slower


def _after_window(state: State, tuning: Tuning) -> State:
    took_s = state.window.step_s
    if state.mode is Mode.SPLIT:
        state = replace(state, window=Average(), split_s=took_s)
    else:
        state = replace(state, window=Average(), link_s=took_s)
    if state.on_trial:
        back = replace(state, mode=state.settled, trial_s=took_s)
        return replace(back, settling=tuning.settle_steps)
    if state.trial_s:
        return _judge(state, tuning, took_s)
    windows, wait = state.windows + 1, state.wait_windows or tuning.first_trial_windows
    if windows < wait:
        return replace(state, windows=windows)
    return replace(
        state,
        mode=state.settled.other,
        settling=tuning.settle_steps,
        before_s=took_s,
        windows=0,
        wait_windows=wait,
    )


def _judge(state: State, tuning: Tuning, after_s: float) -> State:
    """The trial against the windows on both sides of it, so that a slow drift favours neither."""
    here_s = min(state.before_s, after_s)
    if state.trial_s < here_s * (1 - tuning.margin):
        won = state.settled.other
        return replace(
            state,
            mode=won,
            settled=won,
            settling=tuning.settle_steps,
            trial_s=0.0,
            wait_windows=tuning.first_trial_windows,
        )
    return _wait_longer(state, tuning)


def _wait_longer(state: State, tuning: Tuning) -> State:
    longer = min(2 * state.wait_windows, tuning.most_trial_windows)
    return replace(state, trial_s=0.0, wait_windows=longer)
