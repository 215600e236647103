"""``ftd --check``: what a start would do and what would hinder it, from headers alone.

Touches nothing: no weight is read, no file is made; ports, sockets and folders are only tried. One
that another process has is no hindrance: a check runs beside an ftd that serves.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

import click

from ftd import __version__
from ftd.checkpoint.source import ModelSource, NotDownloaded, resolve
from ftd.checkpoint.stored import StoredMatrix
from ftd.config import Config, HttpAddress, flag, read_small, shown
from ftd.cuda.device import choose_gpu
from ftd.cuda.looking import look_by_driver
from ftd.engine.preparing import Prepared, prepare
from ftd.errors import FtdError
from ftd.http.listening import not_listening
from ftd.kernels.cpu import library
from ftd.kernels.cpu.topology import default_threads, usable_cores
from ftd.kv.disk import try_directory
from ftd.memory.machine import Machine, read_machine
from ftd.memory.plan import MemoryPlan
from ftd.model.spec import ModelSpec, MoeSpec
from ftd.text.dialects import refuse_unknown
from ftd.text.textmodel import TextModel
from ftd.units import format_bytes, format_count

TIGHT_SHARE = 0.05  # of the available memory, left by the plan: less is called tight
FEW_DESCRIPTORS = 1024  # a client takes one, a shard of the model another
BESIDE_HINT = (
    f"{flag('socket')} and {flag('http')} start a second one beside it; ftctl stop ends it, "
    "ftctl check MODEL asks it"
)
LOOPBACK = {"127.0.0.1", "::1", "localhost"}


class Severity(StrEnum):
    REFUSED = "refused"  # ftd would not start
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    text: str
    hint: str = ""
    taken: bool = False  # by another process, for as long as that runs

    def __str__(self) -> str:
        return f"{self.severity}: {self.text}" + (f"\n    {self.hint}" if self.hint else "")

    @staticmethod
    def of(error: FtdError) -> Finding:
        return Finding(Severity.REFUSED, error.message, error.hint)


@dataclass(frozen=True, slots=True)
class Report:
    source: ModelSource | None
    prepared: Prepared | None  # None: refused before there was a plan
    findings: tuple[Finding, ...]

    @property
    def starts(self) -> bool:
        return all(f.severity is not Severity.REFUSED for f in self.findings)

    @property
    def verdict(self) -> str:
        if not self.starts:
            return "ftd would not start"
        when = ", once what is taken is free" if any(f.taken for f in self.findings) else ""
        if self.source is None:
            return f"ftd would start to download the model, and then check it{when}"
        return f"ftd would start{when}"


def print_check(config: Config) -> int:
    """Print the report to stdout; 0 if ftd would start, else 1."""
    report = examine(config, read_machine())
    for line in report_lines(config, report):
        click.echo(line)
    return 0 if report.starts else 1


def examine(config: Config, machine: Machine) -> Report:
    """Find everything at once, not only the first thing that is wrong."""
    findings = [
        *http_findings(config.http, has_key=config.api_key_file is not None),
        *socket_findings(config.socket),
        *key_file_findings(config.api_key_file),
        *kernel_findings(config),
        *refusal(lambda: refuse_unknown(config.tool_dialect)),
        *limit_findings(machine, resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    ]
    source, prepared = None, None
    try:
        source = resolve(config.model, download=False)
        prepared = prepare(source.path, config, machine, look=look_by_driver)
        findings += [*device_findings(config, prepared.plan)]
        findings += plan_findings(prepared.spec, prepared.plan)
        if config.anchor_dir is not None:
            findings += refusal(partial(try_directory, config.anchor_dir))
    except NotDownloaded as e:
        findings.append(Finding(Severity.NOTE, f"not checked: {e.message}", e.hint))
    except FtdError as e:
        findings.append(Finding.of(e))
    if source:
        findings += text_findings(source.path)
    order = list(Severity)
    return Report(source, prepared, tuple(sorted(findings, key=lambda f: order.index(f.severity))))


def report_lines(config: Config, report: Report) -> Iterator[str]:
    yield f"ftd {__version__}"
    for name, value, where in config.changed():
        yield f"{'setting':<14}{name} = {shown(name, value)}  ({where})"
    if report.source:
        yield f"{'model':<14}{report.source.name} in {report.source.path}"
    if report.prepared:
        yield from _model_lines(report.prepared)
        yield ""
        yield report.prepared.plan.table()
    yield ""
    for finding in report.findings:
        yield str(finding)
    yield report.verdict


def _model_lines(prepared: Prepared) -> Iterator[str]:
    spec, layout, checkpoint = prepared.spec, prepared.layout, prepared.checkpoint
    mlp = spec.layers[spec.moe_layers[0]].mlp
    assert isinstance(mlp, MoeSpec)
    yield (
        f"{'family':<14}{spec.model_type}, experts in {layout.format_name}, "
        f"context {format_count(spec.context)}"
    )
    yield (
        f"{'layers':<14}{len(spec.layers)}, {len(spec.moe_layers)} of them with "
        f"{mlp.num_experts} experts, {mlp.experts_per_token} for each token"
    )
    yield (
        f"{'expert':<14}{format_count(layout.record_bytes)} B, "
        f"{format_bytes(layout.record_bytes)} each"
    )
    for fmt, modules in sorted(dense_formats(prepared.dense).items()):
        counted = (f"{module} x{count}" if count > 1 else module for module, count in modules)
        yield f"{fmt + ' layers':<14}{', '.join(counted)}"
    yield (
        f"{'checkpoint':<14}{format_count(len(checkpoint.tensors))} tensors in "
        f"{len(checkpoint.files)} files, {format_bytes(checkpoint.num_bytes)}"
    )


def dense_formats(dense: Mapping[str, StoredMatrix]) -> dict[str, list[tuple[str, int]]]:
    """Format → modules whose matrices are stored in it, and how many of each there are."""
    found: dict[str, Counter[str]] = {}
    for name, matrix in dense.items():
        if len(matrix.numbers.tensor.shape) > 1:  # norms and biases are not worth a word
            module = ".".join(part for part in name.split(".") if not part.isdecimal())
            module = ".".join(module.removesuffix(".weight").split(".")[-2:])
            found.setdefault(matrix.format.name, Counter())[module] += 1
    return {fmt: sorted(modules.items()) for fmt, modules in found.items()}


def refusal(checks: Callable[[], None]) -> Iterator[Finding]:
    """What one of the start's own checks raises."""
    try:
        checks()
    except FtdError as e:
        yield Finding.of(e)


def http_findings(address: HttpAddress, *, has_key: bool) -> Iterator[Finding]:
    where = f"{flag('http')} {address}"
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, _, _, sockaddr = found[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(sockaddr)
            probe.listen(1)
    except OSError as e:
        refused = Finding.of(not_listening(address, e))
        taken = replace(refused, severity=Severity.NOTE, hint=BESIDE_HINT, taken=True)
        yield taken if e.errno == errno.EADDRINUSE else refused
    if address.host not in LOOPBACK and not has_key:
        yield Finding(
            Severity.WARNING,
            f"{where}: other machines can use the API without a key",
            f"give {flag('api_key_file')}, or listen on 127.0.0.1",
        )


def socket_findings(path: Path) -> Iterator[Finding]:
    where = f"{flag('socket')} {path}"
    folder = path.parent if path.parent.exists() else path.parent.parent  # ftd makes the last one
    if not folder.is_dir():
        yield Finding(Severity.REFUSED, f"{where}: there is no folder {folder}", "create it")
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(
            Severity.REFUSED,
            f"{where}: user {os.getuid()} may not write in {folder}",
            f"give {flag('socket')} a path in a folder of yours",
        )
    elif path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        yield Finding(
            Severity.REFUSED, f"{where}: a file that is not a socket is there", "name another path"
        )
    elif _answers(path):
        text = f"{where}: another ftd listens there"
        yield Finding(Severity.NOTE, text, BESIDE_HINT, taken=True)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        with contextlib.suppress(OSError):
            probe.connect(str(path))
            return True
    return False


def key_file_findings(path: Path | None) -> Iterator[Finding]:
    if path is None:
        return
    where = f"{flag('api_key_file')} {path}"
    try:
        mode, lines = path.stat().st_mode, read_small(path).splitlines()
    except OSError as e:
        yield Finding(Severity.REFUSED, f"{where}: cannot be read: {e.strerror}")
        return
    if not any(line.strip() and not line.strip().startswith(b"#") for line in lines):
        yield Finding(Severity.REFUSED, f"{where}: holds no key", "write one key a line")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        yield Finding(
            Severity.WARNING, f"{where}: other users may read the keys", f"chmod 600 {path}"
        )


def kernel_findings(config: Config) -> Iterator[Finding]:
    if reason := library.unavailable_reason():
        yield Finding(
            Severity.WARNING,
            f"no compiled CPU kernels ({reason}): torch computes, at a third of the speed or less",
        )
        return
    try:
        isa = library.Library().choose_isa(config.cpu_isa)
    except FtdError as e:
        yield Finding.of(e)
        return
    threads = config.cpu_threads
    if threads == "auto":
        threads = default_threads(usable_cores())
    yield Finding(Severity.NOTE, f"CPU kernels for {isa}, {threads} threads")


def device_findings(config: Config, plan: MemoryPlan) -> Iterator[Finding]:
    if plan.vram:
        gpu = plan.vram.gpu
        capability = ".".join(map(str, gpu.capability))
        text = f"computes on GPU {gpu.index}, {gpu.name}, compute capability {capability}"
        yield Finding(Severity.NOTE, text)
    elif config.device == "auto":
        reason = choose_gpu(config.device, look_by_driver).reason
        yield Finding(Severity.NOTE, f"computes on the CPU: {reason}")


def limit_findings(machine: Machine, descriptors: int) -> Iterator[Finding]:
    if machine.huge_pages == "never":
        yield Finding(
            Severity.WARNING,
            "transparent huge pages are off: reading experts costs more address look-ups",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if 0 <= descriptors < FEW_DESCRIPTORS:
        yield Finding(
            Severity.WARNING,
            f"{descriptors} file descriptors are allowed, {FEW_DESCRIPTORS} serve many clients",
            f"ulimit -n {FEW_DESCRIPTORS}",
        )


def plan_findings(spec: ModelSpec, plan: MemoryPlan) -> Iterator[Finding]:
    left = plan.available_bytes - plan.total_bytes
    if left < TIGHT_SHARE * plan.available_bytes:
        yield Finding(
            Severity.WARNING,
            f"memory is tight: the plan leaves {format_bytes(left)} "
            f"of {format_bytes(plan.available_bytes)}",
            f"lower {flag('kv_tokens')} or {flag('vram')}, or free memory",
        )
    if plan.context_tokens < spec.context:
        yield Finding(
            Severity.NOTE,
            f"context is {format_count(plan.context_tokens)} tokens, the model was trained for "
            f"{format_count(spec.context)}",
        )


def text_findings(path: Path) -> Iterator[Finding]:
    try:
        text = TextModel(path)
    except FtdError as e:
        if (path / "tokenizer.json").is_file():  # a missing one is among the checkpoint's findings
            yield Finding.of(e)
        return
    if not text.has_chat_template:
        yield Finding(
            Severity.WARNING,
            f"{path} has no chat template: /v1/chat/completions will be refused",
            "copy chat_template.jinja from the model's hub page",
        )
