"""The command ``ftctl``: one word for each thing people do.

Results go to stdout, all else to stderr. Exit codes: 0 done, 1 refused, 2 usage, 3 ftd not running,
4 timed out. Loads neither torch nor aiohttp: it starts in a blink on any machine.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import orjson

from ftctl import launch as starting
from ftctl import view
from ftctl.agents import AGENTS
from ftctl.asking import (
    Commands,
    Duration,
    call,
    call_long,
    client_of,
    shared,
    show,
    timeout_of,
    wants_json,
)
from ftctl.live import Screen
from ftctl.trace import save_trace
from ftctl.watch import History, Style, frame
from ftd import __version__
from ftd.control import protocol as p
from ftd.control.client import ANSWER_TIMEOUT_S

NOT_READY = 1  # of ftctl health
UNEQUAL = 1  # of ftctl verify
TRACE_S = 60.0
ANCHORS_SHOWN = 50  # on a terminal


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="ftctl")
@shared
def main() -> None:
    """Look at and change a running ftd."""


@main.command()
@shared
@click.pass_context
def status(ctx: click.Context) -> None:
    """What ftd serves, and how it is doing."""
    show(ctx, call(ctx, p.Status()), view.status)


@main.command()
@shared
@click.pass_context
def health(ctx: click.Context) -> None:
    """Whether a model takes requests.

    Exits 0 if so; otherwise 1, and says why.
    """
    result = call(ctx, p.Health())
    show(ctx, result, view.health)
    if not result.ready:
        ctx.exit(NOT_READY)


@main.command()
@click.option(
    "--interval",
    type=Duration(*p.INTERVAL_S),
    default="500ms",
    show_default=True,
    help="Between two looks.",
)
@shared
@click.pass_context
def watch(ctx: click.Context, interval: float) -> None:
    """Follow the status until q or Ctrl-C.

    A live view on a terminal: map of the memory, KV, experts, misses, rates and requests.
    Otherwise one line for each look; with --json the whole event.
    """
    with client_of(ctx, silence_s=interval + timeout_of(ctx, ANSWER_TIMEOUT_S)) as client:
        try:
            if wants_json(ctx) or not sys.stdout.isatty():
                for result in client.stream(p.Watch(interval)):
                    show(ctx, result, view.one_line)
                    sys.stdout.flush()
            else:
                style = Style(view.Paint.of(sys.stdout), "utf" in sys.stdout.encoding.lower())
                history = History()
                with Screen(sys.stdout, sys.stdin) as screen:
                    for result in client.stream(p.Watch(interval)):
                        history.add(result)
                        screen.draw(partial(_frame, result, history, style))
        except KeyboardInterrupt:
            return
    click.echo("ftd has ended", err=True)


def _frame(
    event: p.StatusResult, history: History, style: Style, columns: int, rows: int
) -> list[str]:
    return frame(event, history, columns, rows, style)


@main.command()
@shared
@click.pass_context
def requests(ctx: click.Context) -> None:
    """The requests that run or wait."""
    show(ctx, call(ctx, p.Requests()), view.requests)


@main.command()
@click.argument("request_id", metavar="ID")
@shared
@click.pass_context
def cancel(ctx: click.Context, request_id: str) -> None:
    """End one request.

    Its client gets an error. ftctl requests shows the ids.
    """
    show(ctx, call(ctx, p.Cancel(request_id)), view.cancelled)


@main.command()
@shared
@click.pass_context
def experts(ctx: click.Context) -> None:
    """Experts in slots, hits and misses."""
    show(ctx, call(ctx, p.Experts()), view.experts)


@main.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.npy")
@click.option("--tokens", type=click.IntRange(1), default=4096, show_default=True)
@shared
@click.pass_context
def trace(ctx: click.Context, file: Path, tokens: int) -> None:
    """Record which experts the router chooses.

    Waits until requests have brought so many tokens, at most 60 s (--timeout), and writes
    [tokens, layers, experts per token] for tools/simulate.py.
    """
    if not os.access(file.parent, os.W_OK):
        raise click.BadParameter(f"cannot write into {file.parent.absolute()}", param_hint="FILE")
    command = p.Trace(tokens, timeout_of(ctx, TRACE_S))
    result = call_long(ctx, command, "the recording")
    try:
        save_trace(file, result)
    except OSError as error:
        raise click.FileError(str(file), error.strerror) from None
    show(ctx, replace(result, data=""), lambda r, paint: view.traced(r, file, paint))


@main.command()
@click.option("--session", metavar="NAME", help="Only those of one session.")
@click.option("--drop", is_flag=True, help="Forget them, with the KV that no request uses.")
@click.option("--dump", type=click.Path(path_type=Path), metavar="FILE", help="Write all as JSON.")
@shared
@click.pass_context
def anchors(ctx: click.Context, session: str | None, drop: bool, dump: Path | None) -> None:
    """Positions that requests can resume from, what they take and what they saved.

    On a terminal the 50 used last; into a pipe, with --json or --dump all.
    """
    result = call(ctx, p.Anchors(drop, session))
    if dump is not None:
        try:
            dump.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
        except OSError as error:
            raise click.FileError(str(dump), error.strerror) from None
    most = ANCHORS_SHOWN if sys.stdout.isatty() else None
    show(ctx, result, partial(view.anchors, most=most))


@main.command()
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.0),
    default=0.0,
    show_default=True,
    help="Of a logprob. 0: equal bit for bit, as float32 on the CPU is.",
)
@click.option(
    "--sessions",
    type=click.Path(path_type=Path, exists=True, resolve_path=True),
    metavar="FILE",
    help="Recorded sessions, in place of those that come with ftd.",
)
@shared
@click.pass_context
def verify(ctx: click.Context, tolerance: float, sessions: Path | None) -> None:
    """Replay sessions of agents, and compare answers with those from cold.

    Exits 0 if reuse has changed nothing.
    """
    command = p.Verify(tolerance, str(sessions) if sessions else None)
    result = call_long(ctx, command, "the replay")
    show(ctx, result, view.verified)
    if not result.equal:
        ctx.exit(UNEQUAL)


@main.command()
@click.argument("model", required=False)
@shared
@click.pass_context
def check(ctx: click.Context, model: str | None) -> None:
    """Check whether MODEL could be loaded.

    Headers, plan, tokenizer and template; default: the served one. Changes nothing.
    """
    show(ctx, call(ctx, p.Check(_absolute(model))), view.checked)


@main.command()
@click.argument("model", required=False)
@click.option("--drain", "how", flag_value="drain", default=True, help="Let requests finish first.")
@click.option("--cut", "how", flag_value="cut", help="End running requests at once.")
@shared
@click.pass_context
def reload(ctx: click.Context, model: str | None, how: str) -> None:
    """Serve MODEL, or read the served one anew.

    The new model is checked before the old one is touched. If both fit into memory, the old one
    serves until the new one is ready, and its requests finish.
    """
    command = p.Reload(_absolute(model), "cut" if how == "cut" else "drain", timeout_of(ctx, None))
    show(ctx, call_long(ctx, command, "the reload"), view.reloaded)


@main.command()
@click.option("--vram", metavar="SIZE|PERCENT|auto", help="All that KV and expert slots may take.")
@click.option("--kv-tokens", metavar="N|auto", help="Tokens of the KV pool.")
@click.option("--expert-slots", metavar="N|auto", help="Experts in slots.")
@click.option("--auto", is_flag=True, help="Divide it between slots and KV by need, from now on.")
@shared
@click.pass_context
def budget(
    ctx: click.Context,
    vram: str | None,
    kv_tokens: str | None,
    expert_slots: str | None,
    auto: bool,
) -> None:
    """Change how much memory ftd has, while requests run.

    Takes what ftd's own flags take; what is not given stays. A budget that cannot be is refused
    with one that can, and nothing changes. --kv-tokens or --expert-slots without --auto ends the
    division by need. Without options: show the plan in force.
    """
    command = p.Budget(vram, kv_tokens, expert_slots, auto)
    show(ctx, call_long(ctx, command, "the change"), view.budget)


@main.command()
@shared
@click.pass_context
def profile(ctx: click.Context) -> None:
    """Measure this machine with the experts that are served.

    Link, CPU, both at once and slots, for each batch size, in some seconds, in slices between the
    steps of requests. Misses are divided by it from then on, and after the next start.
    """
    result = call_long(ctx, p.Profile(), "the measurement", goes_on=False)
    show(ctx, result, view.profiled)


@main.command()
@shared
@click.pass_context
def drain(ctx: click.Context) -> None:
    """Let requests finish, take no new ones.

    ftctl reload serves again.
    """
    show(ctx, call_long(ctx, p.Drain(timeout_of(ctx, None)), "draining"), view.drained)


@main.command()
@shared
@click.pass_context
def stop(ctx: click.Context) -> None:
    """End ftd, and wait until it has ended.

    Running requests get a few seconds.
    """
    with client_of(ctx, silence_s=timeout_of(ctx, ANSWER_TIMEOUT_S)) as client:
        result = client.call(p.Stop())
        client.wait_closed()
    show(ctx, result, view.stopped)


@main.command()
@click.argument("client", type=click.Choice(sorted(AGENTS)))
@click.argument("args", nargs=-1, metavar="[-- ARGS...]")
@click.option("--api", type=click.Choice(["chat", "responses", "messages"]), help="API to use.")
@click.option("--dry-run", is_flag=True, help="Show what would be written, set and run.")
@shared
@click.pass_context
def launch(ctx: click.Context, client: str, args: tuple[str, ...], api: Any, dry_run: bool) -> None:
    """Start a coding agent that uses this ftd.

    Adds ftd to the client's config (keeping a backup of it), tells it the model and its context,
    and keeps keys of cloud services away from it. ARGS are the client's own.
    """
    server = starting.server_of(call(ctx, p.Status()))
    planned = starting.plan(AGENTS[client], api, server, args, os.environ)
    if not dry_run:
        planned.check_installed()
    if wants_json(ctx):
        click.echo(orjson.dumps(planned.facts()))  # the client's own output follows
    elif dry_run:
        click.echo("\n".join(planned.lines()))
    if dry_run:
        return
    for line in starting.apply(planned):
        click.echo(f"ftctl: {line}", err=True)
    sys.stdout.flush()
    starting.run(planned, os.environ)


def _absolute(model: str | None) -> str | None:
    """A directory as seen from here: ftd stands elsewhere."""
    return str(Path(model).resolve()) if model and Path(model).expanduser().is_dir() else model


if __name__ == "__main__":
    main()
