"""What all commands share: options, the call to ftd, and how an answer or a refusal is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import orjson

from ftctl import view
from ftctl.live import Bar
from ftd.config import default_socket
from ftd.control import protocol as p
from ftd.control.client import (
    ANSWER_TIMEOUT_S,
    Client,
    ControlError,
    NotRunning,
    Refused,
    TimedOut,
)
from ftd.units import parse_duration, typed_seconds

EXIT_CODES: dict[type[ControlError], int] = {Refused: 1, NotRunning: 3, TimedOut: 4}

R = TypeVar("R")


class Duration(click.ParamType):
    name = "duration"

    def __init__(self, low_s: float = 0.0, high_s: float = float("inf")) -> None:
        self._low_s, self._high_s = low_s, high_s

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> float:
        try:
            seconds = parse_duration(value) if isinstance(value, str) else float(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not self._low_s <= seconds <= self._high_s:
            low, high = typed_seconds(self._low_s), typed_seconds(self._high_s)
            self.fail(f"expected from {low} to {high}, found {value}", param, ctx)
        return seconds


def shared(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that may stand before or after the subcommand; the later one wins."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        given = ctx.ensure_object(dict)  # the group's, which subcommands inherit
        if value is not None:
            assert param.name
            given[param.name] = value

    for option in (
        click.option(
            "--timeout",
            type=Duration(),
            metavar="DURATION",
            help="Longest silence of ftd (default 10s); for reload and drain: how long running "
            "requests may take to finish (default: ftd's --drain-timeout).",
            expose_value=False,
            callback=keep,
        ),
        click.option(
            "--json",
            is_flag=True,
            default=None,
            help="Print the result as one line of JSON.",
            expose_value=False,
            callback=keep,
        ),
        click.option(
            "--socket",
            type=click.Path(path_type=Path),
            metavar="PATH",
            help="Control socket of ftd. [variable: FTD_SOCKET]",
            expose_value=False,
            callback=keep,
        ),
    ):
        command = option(command)
    return command


class Commands(click.Group):
    """A refusal is told in words, and by the exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ControlError as error:
            _complain(ctx, error.error)
            ctx.exit(EXIT_CODES[type(error)])


def client_of(ctx: click.Context, silence_s: float) -> Client:
    path = ctx.ensure_object(dict).get("socket") or default_socket()
    return Client(path, max(0.001, silence_s))  # 0 would mean: do not wait at all


def call(ctx: click.Context, command: p.Command[R]) -> R:
    with client_of(ctx, timeout_of(ctx, ANSWER_TIMEOUT_S)) as client:
        return client.call(command)


def call_long(ctx: click.Context, command: p.Command[R], name: str, *, goes_on: bool = True) -> R:
    """Show the progress of a command that ftd reports at least each second.

    Args:
        goes_on: ftd ends it although nobody waits for it any more.
    """
    with client_of(ctx, ANSWER_TIMEOUT_S) as client, Bar(sys.stderr) as bar:
        try:
            return client.call(command, bar.draw)
        except KeyboardInterrupt:
            what = "goes on without ftctl; ftctl watch shows it" if goes_on else "is given up"
            click.echo(f"\n{name} {what}", err=True)
            raise


def timeout_of(ctx: click.Context, default: Any) -> Any:
    return ctx.ensure_object(dict).get("timeout", default)


def wants_json(ctx: click.Context) -> bool:
    return bool(ctx.ensure_object(dict).get("json"))


def show(ctx: click.Context, result: R, render: Callable[[R, view.Paint], list[str]]) -> None:
    if wants_json(ctx):
        click.echo(orjson.dumps(result))
    else:
        for line in render(result, view.Paint.of(sys.stdout)):
            click.echo(line, color=True)  # Paint has decided already


def _complain(ctx: click.Context, error: p.Error) -> None:
    if wants_json(ctx):
        click.echo(orjson.dumps({"error": error}), err=True)
        return
    click.echo(f"ftctl: error: {error.message}", err=True)
    if error.hint:
        click.echo(f"ftctl: hint: {error.hint}", err=True)
