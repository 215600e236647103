"""The command ``ftd``: flags made from the fields of ``Config``. Help and version load no torch.

Exit codes: 0 done, 1 refused or failed, 2 a setting that is wrong.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any, NoReturn

import click

from ftd import __version__
from ftd.config import Config, flag, load_config, setting_default, settings
from ftd.errors import ConfigError, FtdError, GpuLost
from ftd.lazy import put_off


def _option(f: dataclasses.Field[Any]) -> click.Option:
    """Values stay text here: ``load_config`` reads flags, variables and file by the same rules."""
    kind = f.metadata["kind"]
    help = f"{f.metadata['help']}  [default: {setting_default(f)}]"
    if f.metadata["reload"]:
        help += "  [changes with ftctl reload]"
    if kind.switch:
        both = f"{flag(f.name)}/{flag('no_' + f.name)}"
        return click.Option([both, f.name], default=None, help=help)
    return click.Option(
        [flag(f.name), f.name],
        type=str,
        multiple=kind.repeatable,
        metavar=kind.metavar,
        help=help,
    )


def _run(check: bool, profile: bool, **flags: Any) -> None:
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    try:
        if check and profile:
            raise ConfigError("--check and --profile are two things", hint="give one of them")
        config = load_config(given)
        if check or profile:
            code = _check(config) if check else _profile(config)
        else:
            code = _serve(config)
    except FtdError as e:
        click.echo(f"ftd: error: {e.message}", err=True)
        if e.hint:
            click.echo(f"ftd: hint: {e.hint}", err=True)
        code = 2 if isinstance(e, ConfigError) else 1
        if isinstance(e, GpuLost):
            _leave(code)  # the interpreter's own end would ask the GPU, and abort
    sys.exit(code)


def _check(config: Config) -> int:
    put_off("torch")  # a check gets by without; importing it would take longer than all the rest
    from ftd import log as logs
    from ftd.check import print_check

    writer = logs.configure(sys.stderr, level="warning")  # stdout is the report's
    try:
        return print_check(config)
    finally:
        writer.close()


def _profile(config: Config) -> NoReturn:
    from ftd.profile import print_profile

    _leave(print_profile(config))


def _serve(config: Config) -> NoReturn:
    from ftd.daemon import run

    _leave(run(config))


def _leave(code: int) -> NoReturn:
    # everything has been closed: taking torch and the interpreter apart would only take time
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


main = click.Command(
    "ftd",
    callback=_run,
    params=[
        *(_option(f) for f in settings()),
        click.Option(
            ["--config"],
            type=str,
            metavar="FILE",
            help="TOML file with settings under the names of the flags; flags and FTD_* variables "
            "win over it.  [variable: FTD_CONFIG]",
        ),
        click.Option(
            ["--check"],
            is_flag=True,
            help="Print the memory plan and everything that would hinder a start, from the headers "
            "of the model alone, and exit.",
        ),
        click.Option(
            ["--profile"],
            is_flag=True,
            help="Load the model, measure link, CPU and GPU with its experts in some seconds, keep "
            "that in --profile-dir for later starts, print it, and exit.",
        ),
    ],
    help="Serve a Mixture-of-Experts model over HTTP, in the foreground. Each setting can also "
    "be given as a variable (--max-running is FTD_MAX_RUNNING). Sizes take K, M, G and T, powers "
    "of 1024.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
main = click.version_option(__version__, prog_name="ftd")(main)
