"""``ftd --profile``: load the model, measure the machine with its experts, keep that, and end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click

from ftd import log as logs
from ftd.checkpoint.source import resolve
from ftd.config import Config
from ftd.control.commands import profile_result
from ftd.control.profile_table import profile_lines
from ftd.engine.loading import load_core
from ftd.engine.measuring import Measured, end_measuring, measure_slice
from ftd.engine.preparing import prepare
from ftd.units import format_bytes


def print_profile(config: Config) -> int:
    """Print the table to stdout, progress to stderr; 0.

    Raises:
        FtdError: the model cannot be loaded, there is nothing to measure, or nowhere to keep it.
    """
    writer = logs.configure(sys.stderr, level="warning")
    tell = _teller(sys.stderr.isatty())
    try:
        source = resolve(config.model, progress=lambda done, of: tell("finding files"))
        prepared = prepare(source.path, config)
        core = load_core(
            config,
            prepared,
            lambda done, of: tell(f"reading weights: {format_bytes(done)} of {format_bytes(of)}"),
        )
        began_s = time.monotonic()
        try:
            while not isinstance(found := measure_slice(core, core).found, Measured):
                tell(f"{found.done / found.of:.0%} {found.phase}")
        finally:
            end_measuring(core, core)
            core.close()
        tell("")
        path = found.save()
        result = profile_result(source.name, found, path, time.monotonic() - began_s, 0.0)
        click.echo("\n".join(profile_lines(result)))
        return 0
    finally:
        writer.close()


def _teller(moves: bool) -> Callable[[str], None]:
    """What shows progress: in place on a terminal, nowhere else."""

    def tell(text: str) -> None:
        if moves:
            click.echo(f"\r{text[:79]}\x1b[K", nl=False, err=True)

    return tell
