"""``ftctl launch``: a coding agent that talks to this ftd, with everything it has to be told.

``plan`` decides from plain facts and refuses; ``apply`` writes the config files it planned; the
child then takes the place of this process, so its exit code and its signals are its own.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from ftctl.agents import KEY_VARIABLE, Agent, Api, ConfigFile, Server
from ftctl.merge import Unreadable, merged_text
from ftd.control.client import Refused
from ftd.control.protocol import Error, StatusResult
from ftd.units import format_count

# What makes a client talk to somebody else, or hands somebody else's key to it.
_CLOUD = re.compile(
    r"(ANTHROPIC|OPENAI|AZURE_OPENAI|AZURE_API|GEMINI|GOOGLE_GENAI|OPENROUTER|LITELLM)_.*"
    r"|CLAUDE_CODE_(USE_.*|OAUTH_TOKEN|MAX_CONTEXT_TOKENS|SUBAGENT_MODEL)"
    r"|AWS_BEARER_TOKEN_BEDROCK|GOOGLE_API_KEY|GOOGLE_GENERATIVE_AI_API_KEY"
    r"|(AI_GATEWAY|BAILIAN_CODING_PLAN|CEREBRAS|CLINE|CODEX|COHERE|DASHSCOPE|DEEPSEEK|FIREWORKS"
    r"|GROQ|HUGGINGFACE|KIMI|MINIMAX|MISTRAL|MOONSHOT|NVIDIA|OLLAMA|OPENCODE|PERPLEXITY|TOGETHER"
    r"|TOGETHERAI|XAI|ZAI|ZHIPU)_API_KEY"
    rf"|{KEY_VARIABLE}"
)
_NO_KEY = "local"
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


@dataclass(frozen=True, slots=True)
class Change:
    """A config file as it will be; ``was`` is what stands there, None: nothing."""

    path: Path
    text: str
    was: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    agent: Agent
    api: Api
    server: Server
    changes: tuple[Change, ...]  # without those that stand already
    set: Mapping[str, str]
    cleared: tuple[str, ...]
    command: tuple[str, ...]
    installed: bool

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        kept = {k: v for k, v in environ.items() if k not in self.cleared}
        return {**kept, **self.set}

    def facts(self) -> dict[str, Any]:
        """For --json; a key that opens something is not shown."""
        return {
            "client": self.agent.name,
            "installed": self.installed,
            "api": self.api,
            "url": self.server.root,
            "model": self.server.model,
            "context_tokens": self.server.context_tokens,
            "files": [{"path": str(c.path), "text": self.shown(c.text)} for c in self.changes],
            "set": {name: self.shown(value) for name, value in self.set.items()},
            "cleared": list(self.cleared),
            "command": [self.shown(word) for word in self.command],
        }

    def shown(self, text: str) -> str:
        return text if self.server.key == _NO_KEY else text.replace(self.server.key, "***")

    def lines(self) -> list[str]:
        """For --dry-run."""
        out = []
        for change in self.changes:
            out += [f"would write {change.path}:", *self.shown(change.text).splitlines()]
        out += [f"would set {k}={self.shown(v)}" for k, v in self.set.items()]
        out += [f"would clear {name}" for name in self.cleared]
        out.append(f"would run {self.shown(shlex.join(self.command))}")
        if not self.installed:
            out.append(f"{_missing(self.agent)}; install it with: {self.agent.install}")
        return out

    def check_installed(self) -> None:
        """Raises Refused."""
        if not self.installed:
            hint = f"install it with: {self.agent.install}"
            raise _refused("client_missing", _missing(self.agent), hint)


def server_of(status: StatusResult) -> Server:
    """What a client has to know of a running ftd. Raises Refused: it serves nothing yet."""
    if status.model is None or status.limits is None:
        raise _refused(
            "model_not_ready",
            f"ftd serves no model: it is {status.state}"
            + (f", {status.cause}" if status.cause else ""),
            "ftctl health says when it does",
        )
    url = urlsplit(status.http)
    host = _ANY_ADDRESS.get(url.hostname or "", url.hostname or "")
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return Server(
        root=f"http://{host}:{url.port}",
        model=status.model,
        context_tokens=min(status.limits.context_tokens, status.limits.pool_tokens),
        key=_key(status.api_key_file) if status.api_key_file else _NO_KEY,
        trained_tokens=status.limits.trained_tokens,
    )


def plan(
    agent: Agent,
    api: Api | None,
    server: Server,
    args: tuple[str, ...],
    environ: Mapping[str, str],
) -> Plan:
    """Raises Refused; nothing has been written then."""
    api = api or agent.apis[0]
    if api not in agent.apis:
        raise _refused(
            "api_unknown",
            f"{agent.title} does not speak {api}; it speaks {', '.join(agent.apis)}",
            f"ftctl launch {agent.name} --api {agent.apis[0]}",
        )
    if server.context_tokens < agent.min_context_tokens:
        raise _refused(
            "context_too_small",
            f"{agent.title} needs a context of {format_count(agent.min_context_tokens)} tokens "
            f"(its first request alone is about {format_count(agent.first_request_tokens)}), "
            f"{server.model} has {format_count(server.context_tokens)}",
            "raise --context and --kv-tokens of ftd"
            if server.trained_tokens >= agent.min_context_tokens
            else "serve a model with a larger context",
        )
    binary = shutil.which(agent.name, path=environ.get("PATH"))
    setup = agent.setup(server, api)
    changes = [_change(file, environ) for file in setup.files]
    named = [w for f, c in zip(setup.files, changes) if f.option for w in (f.option, str(c.path))]
    env = {**setup.env, **_no_proxy(server, environ)}
    return Plan(
        agent=agent,
        api=api,
        server=server,
        changes=tuple(change for change in changes if change.text != change.was),
        set=env,
        cleared=tuple(sorted(k for k in environ if _CLOUD.fullmatch(k) and k not in env)),
        command=(binary or agent.name, *named, *setup.args, *(args or agent.default_args)),
        installed=binary is not None,
    )


def apply(planned: Plan) -> list[str]:
    """Write the config files; returns what was done, a line for each."""
    done = []
    for change in planned.changes:
        backup = _write(change)
        done.append(f"wrote {change.path}" + (f", the earlier one is {backup}" if backup else ""))
    return done


def run(planned: Plan, environ: Mapping[str, str]) -> NoReturn:
    """Become the client."""
    os.execve(planned.command[0], planned.command, planned.environ(environ))


def _change(file: ConfigFile, environ: Mapping[str, str]) -> Change:
    place = environ.get(file.variable) if file.variable else None
    folder = Path(place) if place else Path(environ.get("HOME") or Path.home()) / file.folder
    path = (folder / file.name).resolve()  # where links of a dotfile collection lead
    try:
        was = path.read_text() if path.exists() else None
        return Change(path, merged_text(path.name, was or "", file.content, file.defaults), was)
    except (OSError, UnicodeDecodeError, Unreadable) as error:
        raise _refused(
            "config_unreadable", f"{path} cannot be changed: {error}", "mend it, or move it away"
        ) from None


def _write(change: Change) -> Path | None:
    """Put the file in place as a whole; returns where the earlier one is kept."""
    path, backup = change.path, None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if change.was is not None:
            backup = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}.bak")
            shutil.copy2(path, backup)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        with os.fdopen(handle, "w") as file:
            file.write(change.text)
        if backup:
            shutil.copymode(backup, name)
        os.replace(name, path)
    except OSError as error:
        raise _refused("config_unwritable", f"{path} cannot be written: {error}", "") from None
    return backup


def _no_proxy(server: Server, environ: Mapping[str, str]) -> dict[str, str]:
    """Keep requests to this machine away from a proxy that the user has set."""
    if not any(k.lower() in ("http_proxy", "https_proxy", "all_proxy") for k in environ):
        return {}
    host = (urlsplit(server.root).hostname or "").strip("[]")
    hosts = [h for h in (environ.get("NO_PROXY") or environ.get("no_proxy", "")).split(",") if h]
    value = ",".join(dict.fromkeys([*hosts, "localhost", host]))
    return {"NO_PROXY": value, "no_proxy": value}


def _key(file: str) -> str:
    try:
        lines = [line.strip() for line in Path(file).read_text().splitlines()]
    except OSError as error:
        raise _refused("key_unreadable", f"the keys of ftd in {file}: {error}", "") from None
    return next((line for line in lines if line and not line.startswith("#")), _NO_KEY)


def _missing(agent: Agent) -> str:
    return f"{agent.title} is not installed: there is no {agent.name} in PATH"


def _refused(code: str, message: str, hint: str) -> Refused:
    return Refused(Error(code, message, hint))
