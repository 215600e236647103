"""Every setting of ftd in one frozen ``Config``: flags > FTD_* variables > TOML file > defaults.

A field of ``Config`` is a setting: ``max_running`` is ``--max-running``, ``FTD_MAX_RUNNING`` and
``max_running`` in the file. Flags, help text and checks are made from the fields; only this module
reads the environment. "auto" stands in a field until the memory plan or the engine resolves it.
"""

# ruff: noqa: RUF009 - setting() is dataclasses.field() with more metadata

from __future__ import annotations

import dataclasses
import difflib
import errno
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ftd import kinds
from ftd.errors import ConfigError
from ftd.kinds import FaultSpec, HttpAddress, Kind
from ftd.units import Amount, GiB, KiB, MiB, format_bytes, typed_seconds

Auto = Literal["auto"]
CpuIsa = Literal["auto", "portable", "avx2", "avx512", "avx512bf16", "amx"]

# Kubernetes puts these into every pod that can see a service called "ftd"
_NOT_OURS = re.compile(r"FTD_(SERVICE_(HOST|PORT)|PORT)(_.*)?")

UNIX_PATH_BYTES = 107  # sun_path without its final zero
FILE_BYTES = MiB  # of a file that people write; devices never end


def setting(
    default: Any, kind: Kind, help: str, *, default_text: str = "", reload: bool = False
) -> Any:
    """A field of ``Config``. ``reload``: ``ftctl reload`` changes it; the others need a restart."""
    about = {"kind": kind, "help": help, "default_text": default_text, "reload": reload}
    if callable(default):
        return field(default_factory=default, metadata=about)
    return field(default=default, metadata=about)


def default_socket(environ: Mapping[str, str] | None = None) -> Path:
    """Where ftd listens and ftctl knocks: $FTD_SOCKET, the user's runtime folder, or /run/ftd."""
    env = os.environ if environ is None else environ
    if env.get("FTD_SOCKET"):
        return Path(env["FTD_SOCKET"]).expanduser()
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"]) / "ftd.sock"
    return Path("/run/ftd/ftd.sock")


def default_profile_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The user's cache: $XDG_CACHE_HOME, else ~/.cache."""
    env = os.environ if environ is None else environ
    cache = Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "ftd" / "profiles"


@dataclass(frozen=True, slots=True)
class Config:
    model: str = setting(
        "demo",
        kinds.text(),
        "What to serve: a directory in Hugging Face layout, a hub id OWNER/NAME, or demo.",
        reload=True,
    )
    served_name: tuple[str, ...] = setting(
        (),
        kinds.several(kinds.text()),
        "Name of the model in the API; may be given several times.",
        default_text="the directory's name or the hub id",
        reload=True,
    )
    http: HttpAddress = setting(
        HttpAddress("127.0.0.1", 1919), kinds.http_address(), "Address of the HTTP API."
    )
    socket: Path = setting(
        default_socket,
        kinds.path(UNIX_PATH_BYTES),
        "Control socket for ftctl.",
        default_text="$XDG_RUNTIME_DIR/ftd.sock, else /run/ftd/ftd.sock",
    )
    device: str = setting(
        "auto",
        kinds.device(),
        "Where to compute: cpu, cuda, cuda:N, or auto: on GPU 0 if it is usable, else on the CPU.",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = setting(
        "auto",
        kinds.choice("auto", "bfloat16", "float32"),
        "Type of activations and KV: auto, bfloat16, or float32 for comparing with references.",
    )
    context: int | Auto = setting(
        "auto",
        kinds.whole(16, 2**24, auto=True, kilo=True),
        "Longest sequence, prompt and answer together, in tokens.",
    )
    kv_tokens: int | Auto = setting(
        "auto",
        kinds.whole(16, 2**28, auto=True, kilo=True),
        "Size of the KV pool that all sequences and the prefix cache share, in tokens.",
    )
    host_kv: int | Auto = setting(
        "auto",
        kinds.size(0, 2**50, auto=True),
        "Host memory for KV that is evicted from a GPU and may be asked for again; pinned as it "
        "fills up. auto: a share of what is free beside the experts; 0: none. The CPU device has "
        "its KV in host memory already.",
    )
    vram: Amount | Auto | None = setting(
        None,
        kinds.amount(auto=True),
        "Budget of GPU memory: all that the driver shows for the process, in bytes or as a share "
        "of the GPU's memory; auto: what other processes leave, followed while serving. On the CPU "
        "device: ordinary memory for KV and expert slots, a share of what is free beside the "
        "weights; giving it turns slots on.",
        default_text="most of what is free on the GPU",
    )
    expert_slots: int | Auto = setting(
        "auto",
        kinds.whole(0, 2**20, auto=True),
        "Experts kept in slots; auto fills --vram; without --vram the CPU device has none.",
    )
    cpu_threads: int | Auto = setting(
        "auto",
        kinds.whole(1, 1024, auto=True),
        "Threads that compute; auto leaves cores to the event loop and the engine thread.",
    )
    cpu_isa: CpuIsa = setting(
        "auto",
        kinds.choice(*get_args(CpuIsa)),
        "Instruction set of the CPU kernels: " + ", ".join(get_args(CpuIsa)) + ".",
    )
    prefill_chunk: int | Auto = setting(
        "auto",
        kinds.whole(1, 2**16, auto=True, kilo=True),
        "Prompt tokens computed in one pass, which pauses now and then for others to decode.",
    )
    max_running: int = setting(8, kinds.whole(1, 1024), "Sequences computed at the same time.")
    max_waiting: int = setting(
        256, kinds.whole(0, 2**20), "Requests that may wait; further ones get status 429."
    )
    drain_timeout: float = setting(
        30.0,
        kinds.duration(0, 86400),
        "How long a drain or reload waits for running requests before it ends them.",
    )
    heartbeat: float = setting(
        5.0, kinds.duration(0.1, 3600), "Longest silence of a stream before an empty chunk is sent."
    )
    hold: float = setting(
        100.0,
        kinds.duration(0, 3600),
        "How long a plain request waits for a model that is being loaded before it is refused; "
        "some clients give up when nothing comes for 120 s. Streams get life signs and wait on.",
    )
    anchor_dir: Path | None = setting(
        None,
        kinds.path(),
        "Directory that keeps what requests can resume from across restarts.",
        default_text="not kept",
    )
    anchor_bytes: int = setting(
        8 * GiB,
        kinds.size(MiB, 2**50),
        "Most bytes that --anchor-dir may hold of one model.",
        default_text="8G",
    )
    profile_dir: Path = setting(
        default_profile_dir,
        kinds.path(),
        "Folder of what ftd --profile and ftctl profile have measured of machines.",
        default_text="$XDG_CACHE_HOME/ftd/profiles, else ~/.cache/ftd/profiles",
    )
    idle_unload: float | None = setting(
        None,
        kinds.duration(1, 7 * 86400),
        "Free the model's memory when no request has come for so long; the next one loads it "
        "again, and waits for it as --hold says.",
        default_text="never",
    )
    thinking: Literal["auto", "on", "off"] = setting(
        "auto",
        kinds.choice("auto", "on", "off"),
        "Whether models think when a request does not say; auto: as the checkpoint's template has "
        "it, and on /v1/messages not.",
    )
    tool_dialect: str = setting(
        "auto",
        kinds.text(),
        "How the model writes tool calls and thinking: the name of a family such as hermes; auto: "
        "as its chat template tells.",
    )
    drop_billing_line: bool = setting(
        True,
        kinds.switch(),
        "Leave the billing line, which Claude Code changes now and then, out of the prompt, so "
        "that the rest is found in the prefix cache.",
    )
    body_limit: int = setting(32 * MiB, kinds.size(KiB, GiB), "Largest request body accepted.")
    api_key_file: Path | None = setting(
        None,
        kinds.path(),
        "File with one API key a line; requests must then carry one of them.",
        default_text="no key needed",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        kinds.several(
            kinds.shaped("a name such as gpu.example, without port, or *", r"\*|[^\s/:*]+", "NAME")
        ),
        "Host names requests may be addressed to, beside the address listened on; may be given "
        "several times; * allows all.",
        default_text="localhost",
    )
    allow_origin: tuple[str, ...] = setting(
        (),
        kinds.several(
            kinds.shaped(
                "an origin such as https://chat.example:8080, or *",
                r"\*|[A-Za-z][\w+.-]*://[^\s/?#*]+/?",
                "ORIGIN",
            )
        ),
        "Web origin whose pages may call the API (CORS); may be given several times.",
        default_text="none",
    )
    load_threads: int | Auto = setting(
        "auto", kinds.whole(1, 256, auto=True), "Threads that read weights from disk."
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info",
        kinds.choice("debug", "info", "warning", "error"),
        "Least severe event that is logged.",
    )
    log_format: Literal["auto", "json", "console"] = setting(
        "auto",
        kinds.choice("auto", "json", "console"),
        "json, console, or auto: console on a terminal, json elsewhere.",
    )
    log_prompts: bool = setting(False, kinds.switch(), "Write prompts and answers to the log.")
    fault: FaultSpec = setting(
        FaultSpec(),
        kinds.fault(),
        "For tests: in the N-th step fail (step:N), find no memory (memory:N), lose the GPU "
        "(gpu:N), or have a CPU that stops answering it (stuck:N); fail in the N-th load (load:N); "
        "slow steps (slow:50ms).",
        default_text="none",
    )
    # Who gave each value that is not a default, for messages: "--context", "FTD_CONTEXT", ...
    origin: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def named(self, name: str) -> str:
        """A setting as its giver knows it: "--context 4096", "FTD_CONTEXT=4096"."""
        value = getattr(self, name)
        origin = self.origin.get(name, flag(name))
        return f"{origin} {value}" if origin.startswith("--") else f"{origin} = {value}"

    def changed(self) -> Iterator[tuple[str, Any, str]]:
        """(name, value, where it came from) of every setting that is not at its default."""
        for f in settings():
            if f.name in self.origin:
                yield f.name, getattr(self, f.name), self.origin[f.name]


def settings() -> tuple[dataclasses.Field[Any], ...]:
    return tuple(f for f in dataclasses.fields(Config) if "kind" in f.metadata)


def setting_default(f: dataclasses.Field[Any]) -> str:
    """The default as the help text shows it."""
    if text := str(f.metadata["default_text"]):
        return text
    return shown(f.name, f.default)


def shown(name: str, value: object) -> str:
    """A value as a person would type it."""
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return typed_seconds(value)
    return format_bytes(value) if name == "body_limit" and isinstance(value, int) else str(value)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return "FTD_" + name.upper()


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Config:
    """The settings in force. ``flags``: field name → text (several: a tuple) of the flags given.

    "config" among them, or FTD_CONFIG, names the TOML file.

    Raises:
        ConfigError: an unknown name, a wrong type or value, or two that contradict each other.
    """
    env = dict(os.environ if environ is None else environ)
    fields = {f.name: f for f in settings()}
    file = flags.get("config") or env.get("FTD_CONFIG")
    values: dict[str, Any] = {
        "socket": default_socket(env),
        "profile_dir": default_profile_dir(env),
    }
    origin: dict[str, str] = {}
    given: list[tuple[str, str, object, bool]] = []  # weakest first
    if file:
        given += [(name, where, v, True) for name, where, v in _from_file(Path(file), fields)]
    given += [(name, where, v, False) for name, where, v in _from_environment(env, fields)]
    given += [(n, flag(n), v, False) for n, v in flags.items() if n in fields and v is not None]
    for name, where, value, typed in given:
        try:
            values[name] = fields[name].metadata["kind"].read(value, typed)
        except ValueError as e:
            raise ConfigError(f"{where}: {e}") from None
        origin[name] = where
    config = Config(**values, origin=origin)
    _refuse_contradictions(config)
    return config


def read_small(path: Path) -> bytes:
    """Settings or keys, also from a pipe. Raises OSError, for more than ``FILE_BYTES`` as well."""
    with path.open("rb") as file:
        content = file.read(FILE_BYTES + 1)
    if len(content) > FILE_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(FILE_BYTES)}")
    return content


def _from_file(path: Path, fields: Mapping[str, object]) -> Iterator[tuple[str, str, object]]:
    try:
        table = tomllib.loads(read_small(path.expanduser()).decode())
    except OSError as e:
        raise ConfigError(f"--config {path}: cannot be read: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"--config {path}: not valid TOML: {e}") from e
    seen: dict[str, str] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in fields:
            raise ConfigError(f"{path}: unknown key {key!r}", hint=_nearest(name, fields))
        if name in seen:
            raise ConfigError(f"{path}: {seen[name]!r} and {key!r} are the same setting")
        seen[name] = key
        yield name, f"{path}: {key}", value


def _from_environment(
    env: Mapping[str, str], fields: Mapping[str, object]
) -> Iterator[tuple[str, str, object]]:
    variables = {variable(name): name for name in fields}
    for key in sorted(k for k in env if k.startswith("FTD_")):
        if key == "FTD_CONFIG" or _NOT_OURS.fullmatch(key) or (key in variables and not env[key]):
            continue  # an empty variable is a variable not set
        if key not in variables:
            raise ConfigError(f"{key}: unknown variable", hint=_nearest(key, variables))
        yield variables[key], key, env[key]


def _nearest(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else "known are " + ", ".join(sorted(known))


def _refuse_contradictions(config: Config) -> None:
    context, kv_tokens = config.context, config.kv_tokens
    if isinstance(context, int) and isinstance(kv_tokens, int) and context > kv_tokens:
        raise ConfigError(
            f"{config.named('context')} contradicts {config.named('kv_tokens')}: "
            "one sequence cannot be longer than the KV pool",
            hint=f"raise {flag('kv_tokens')} to at least {context}, "
            f"or lower {flag('context')} to at most {kv_tokens}",
        )
    if "*" in config.allow_origin and len(config.allow_origin) > 1:
        raise ConfigError(
            f"{config.origin.get('allow_origin', '--allow-origin')}: * allows every origin and "
            "stands beside others",
            hint="give either * or a list of origins",
        )
