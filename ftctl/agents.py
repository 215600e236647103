"""Coding agents as data: how each one is told about a server.

``ftctl launch`` and ``tools/run_agents.py`` read this table; nothing here touches files, processes
or the environment. A client is told in up to three ways: a piece of its own config file (merged
into what stands there), variables of its process, and arguments. Where it can, it leaves the
client's default model alone: started without ``ftctl launch`` the client is what it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["chat", "responses", "messages"]

PROVIDER = "ftd"  # name of the entry in clients' configs
KEY_VARIABLE = "LOCAL_API_KEY"  # where a config only names the variable that holds the key
WORK_TOKENS = 8192  # what must be left of the context beside a client's first request
WAIT_MS = 30 * 60_000  # for clients that can be told to be patient with a long prefill


@dataclass(frozen=True, slots=True)
class Server:
    """What a client has to know; the context is what one conversation can really hold."""

    root: str  # http://127.0.0.1:1919, without /v1
    model: str
    context_tokens: int
    key: str  # clients want one, even where the server does not
    trained_tokens: int = 0  # how far the context can be raised

    @property
    def v1(self) -> str:
        return f"{self.root}/v1"

    @property
    def answer_tokens(self) -> int:
        """How long clients that reserve room for an answer should make it."""
        return min(32_000, self.context_tokens // 4)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A piece of a config file; ``content`` is merged into what stands there.

    The file is ``$variable/name`` if the client's own variable is set, else ``~/folder/name``.
    """

    variable: str
    folder: str
    name: str
    content: dict[str, Any]
    defaults: dict[str, Any] = field(default_factory=dict)  # only where nothing stands
    option: str = ""  # with which the client wants it named


@dataclass(frozen=True, slots=True)
class Setup:
    files: tuple[ConfigFile, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()  # before those the user gives


@dataclass(frozen=True, slots=True)
class Agent:
    name: str  # of the command, too
    title: str
    install: str
    apis: tuple[Api, ...]  # the first one unless the user says otherwise
    first_request_tokens: int  # system prompt, tools and a short question, as seen
    setup: Callable[[Server, Api], Setup]
    work_tokens: int = WORK_TOKENS
    default_args: tuple[str, ...] = ()  # when the user gives none

    @property
    def min_context_tokens(self) -> int:
        return self.first_request_tokens + self.work_tokens


def _claude(server: Server, _: Api) -> Setup:
    names = ("MODEL", "SMALL_FAST_MODEL", *(f"DEFAULT_{n}_MODEL" for n in _CLAUDE_FAMILIES))
    env = {
        "ANTHROPIC_BASE_URL": server.root,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        **{f"ANTHROPIC_{name}": server.model for name in names},
        "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
        # for an unknown model it assumes 1,000,000 tokens, and would compact far too late
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context_tokens),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    # outranks the env of the user's settings.json, which outranks that of the process
    file = ConfigFile("CLAUDE_CONFIG_DIR", ".claude", "ftd.json", {"env": env}, option="--settings")
    return Setup((file,), env)


_CLAUDE_FAMILIES = ("OPUS", "SONNET", "HAIKU")


def _codex(server: Server, _: Api) -> Setup:
    provider = {
        "name": PROVIDER,
        "base_url": server.v1,
        "wire_api": "responses",
        "env_key": KEY_VARIABLE,
    }
    chosen: dict[str, str | int] = {
        "model": server.model,
        "model_provider": PROVIDER,
        "model_context_window": server.context_tokens,
    }
    return Setup(
        files=(
            ConfigFile(
                "CODEX_HOME", ".codex", "config.toml", {"model_providers": {PROVIDER: provider}}
            ),
        ),
        env={KEY_VARIABLE: server.key},
        args=tuple(w for k, v in chosen.items() for w in ("-c", f"{k}={json.dumps(v)}")),
    )


def _opencode(server: Server, api: Api) -> Setup:
    package: dict[Api, str] = {
        "chat": "@ai-sdk/openai-compatible",
        "responses": "@ai-sdk/openai",
        "messages": "@ai-sdk/anthropic",
    }
    limit = {"context": server.context_tokens, "output": server.answer_tokens}
    provider = {
        "npm": package[api],
        "name": PROVIDER,
        "options": {"baseURL": server.v1, "apiKey": server.key},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    name = f"{PROVIDER}/{server.model}"
    return Setup(
        files=(
            ConfigFile(
                "XDG_CONFIG_HOME",
                ".config",
                "opencode/opencode.json",
                {"$schema": "https://opencode.ai/config.json", "provider": {PROVIDER: provider}},
            ),
        ),
        # outranks every config file, a project's too
        env={"OPENCODE_CONFIG_CONTENT": json.dumps({"model": name, "small_model": name})},
    )


def _qwen(server: Server, api: Api) -> Setup:
    protocol: dict[Api, str] = {"chat": "openai", "messages": "anthropic"}
    kind = protocol[api]
    model = {
        "id": server.model,
        "name": f"{server.model} ({PROVIDER})",
        "baseUrl": server.v1 if api == "chat" else server.root,
        "envKey": KEY_VARIABLE,
        "generationConfig": {
            "contextWindowSize": server.context_tokens,
            # over messages no life sign keeps it waiting
            "timeout": WAIT_MS,
            "streamIdleTimeoutMs": WAIT_MS,
        },
    }
    return Setup(
        files=(
            ConfigFile("QWEN_HOME", ".qwen", "settings.json", {"modelProviders": {kind: [model]}}),
        ),
        env={KEY_VARIABLE: server.key},
        args=("--auth-type", kind, "--model", server.model),
    )


def _pi_provider(server: Server, api: Api) -> dict[str, Any]:
    """Pi's format, which OpenClaw shares."""
    kind: dict[Api, str] = {
        "chat": "openai-completions",
        "responses": "openai-responses",
        "messages": "anthropic-messages",
    }
    model = {
        "id": server.model,
        "name": server.model,
        "reasoning": False,
        "input": ["text"],
        "contextWindow": server.context_tokens,
        "maxTokens": server.answer_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    root = server.root if api == "messages" else server.v1
    return {"baseUrl": root, "api": kind[api], "apiKey": server.key, "models": [model]}


def _pi(server: Server, api: Api) -> Setup:
    content = {"providers": {PROVIDER: _pi_provider(server, api)}}
    return Setup(
        files=(ConfigFile("PI_CODING_AGENT_DIR", ".pi/agent", "models.json", content),),
        args=("--provider", PROVIDER, "--model", server.model),
    )


def _openclaw(server: Server, api: Api) -> Setup:
    content = {
        "models": {"mode": "merge", "providers": {PROVIDER: _pi_provider(server, api)}},
        # the gateway and its channels know no other way to choose a model
        "agents": {"defaults": {"model": {"primary": f"{PROVIDER}/{server.model}"}}},
    }
    return Setup(
        files=(ConfigFile("OPENCLAW_STATE_DIR", ".openclaw", "openclaw.json", content),),
    )


def _cline(server: Server, api: Api) -> Setup:
    names: dict[Api, str] = {
        "chat": "openai-compatible",
        "responses": "openai-native",
        "messages": "anthropic",
    }
    name = names[api]
    settings = {
        "provider": name,
        "model": server.model,
        "apiKey": server.key,
        "baseUrl": server.v1,
        "contextWindow": server.context_tokens,
        "maxTokens": server.answer_tokens,
    }
    unset = {"tokenSource": "manual", "updatedAt": "2026-01-01T00:00:00.000Z"}
    file = ConfigFile(
        "CLINE_DATA_DIR",
        ".cline/data",
        "settings/providers.json",
        {"providers": {name: {"settings": settings}}},
        {"version": 1, "providers": {name: unset}},
    )
    return Setup((file,), args=("-P", name, "-m", server.model))


def _mini(server: Server, api: Api) -> Setup:
    return Setup(
        env={
            **_litellm(server, api),
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
        },
        args=("-m", f"{_litellm_kind(api)}/{server.model}"),
    )


def _aider(server: Server, api: Api) -> Setup:
    kind = _litellm_kind(api)
    facts = {
        "litellm_provider": kind,
        "mode": "chat",
        "max_input_tokens": server.context_tokens,
        "max_output_tokens": server.answer_tokens,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
    }
    name = f"{kind}/{server.model}"
    return Setup(
        files=(ConfigFile("", "", ".aider.model.metadata.json", {name: facts}),),
        env=_litellm(server, api),
        args=("--model", name),
    )


def _litellm_kind(api: Api) -> str:
    return "anthropic" if api == "messages" else "openai"


def _litellm(server: Server, api: Api) -> dict[str, str]:
    if api == "messages":
        where = dict.fromkeys(("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE"), server.root)
        key = "ANTHROPIC_API_KEY"
    else:
        where = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), server.v1)
        key = "OPENAI_API_KEY"
    return {**where, key: server.key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


AGENTS: dict[str, Agent] = {
    agent.name: agent
    for agent in (
        Agent(
            "claude",
            "Claude Code",
            "npm install -g @anthropic-ai/claude-code",
            ("messages",),
            12_200,
            _claude,
        ),
        Agent("codex", "Codex", "npm install -g @openai/codex", ("responses",), 9_600, _codex),
        Agent(
            "opencode",
            "opencode",
            "npm install -g opencode-ai",
            ("chat", "responses", "messages"),
            7_700,
            _opencode,
        ),
        Agent(
            "qwen",
            "Qwen Code",
            "npm install -g @qwen-code/qwen-code (node 22 or later)",
            ("chat", "messages"),
            19_000,
            _qwen,
        ),
        Agent(
            "pi",
            "pi",
            "npm install -g @earendil-works/pi-coding-agent (node 22.19 or later)",
            ("chat", "responses", "messages"),
            1_400,
            _pi,
            work_tokens=16_384,  # it compacts when less is free
        ),
        Agent(
            "cline",
            "Cline",
            "npm install -g cline",
            ("chat", "responses", "messages"),
            5_600,
            _cline,
        ),
        Agent(
            "openclaw",
            "OpenClaw",
            "npm install -g openclaw (node 24.16 or later)",
            ("chat", "responses", "messages"),
            14_800,
            _openclaw,
            work_tokens=16_384,
            default_args=("chat",),
        ),
        Agent(
            "mini",
            "mini-swe-agent",
            "pip install mini-swe-agent",
            ("chat", "messages"),
            900,
            _mini,
        ),
        Agent(
            "aider",
            "aider",
            "pip install aider-chat",
            ("chat", "messages"),
            2_500,
            _aider,
        ),
    )
}
