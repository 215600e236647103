"""Chat templates: jinja2 in a sandbox, rendered exactly as transformers does, but bounded.

A template comes with the checkpoint and is not to be trusted with a thread: Python cannot stop one
that loops for ever, so every loop and macro body starts with a hidden call that counts and looks at
the clock, and the two operators that build something huge in one go are checked.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ftd.errors import CheckpointError, FtdError, RequestInvalid

from .conversation import EFFORTS, TemplateFacts

CPU_LIMIT_S = 5.0  # of the rendering thread; 2,000 messages of an agent take about 0.1
MAX_CHARS = 64 * 2**20  # of the text, and of anything the template builds by repetition
MAX_POWER_BITS = 4096
_LOOKS_EVERY = 64  # loop rounds between two looks at the clock, which costs a system call

_THINKING_NAMES = ("reasoning_content", "reasoning", "thinking")  # of a message, most usual first

Message = Mapping[str, Any]


class TemplateRefused(RequestInvalid):
    """The template cannot render these messages; the message holds its own reason."""

    code = "chat_template_refused"


class TemplateRunaway(RequestInvalid):
    """Rendering was cut; trying again with other messages would only cost the same once more."""

    code = "chat_template_runaway"


class _Meter(threading.local):
    """What the rendering in this thread has used."""

    ticks = 0
    deadline_s = 0.0
    limit_s = 0.0

    def start(self, limit_s: float) -> None:
        self.ticks, self.limit_s = 0, limit_s
        self.deadline_s = time.thread_time() + limit_s

    def tick(self) -> str:
        self.ticks += 1
        if self.ticks % _LOOKS_EVERY == 0 and time.thread_time() > self.deadline_s:
            raise TemplateRunaway(
                f"the model's chat template was cut after {self.limit_s:g} s of computing "
                f"and {self.ticks:,} loop rounds",
                param="messages",
            )
        return ""


_meter = _Meter()


class _Metered(jinja2.ext.Extension):
    """Adds the hidden call, and the ``{% generation %}`` block, which marks text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("transparent"), [], [], body).set_lineno(
            line
        )

    @staticmethod
    def transparent(caller: Callable[[], str]) -> str:
        return caller()

    @staticmethod
    def tick() -> str:
        return _meter.tick()


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        metered = self.extensions[_Metered.identifier]
        for node in tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
            call = jinja2.nodes.ExprStmt(metered.call_method("tick"), lineno=node.lineno)
            node.body.insert(0, call)  # type: ignore[attr-defined]
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "*", (str() | list() | tuple()), int():
                _check_chars(len(left) * right)
            case "*", int(), (str() | list() | tuple()):
                _check_chars(len(right) * left)
            case "**", int(), int() if left.bit_length() * right > MAX_POWER_BITS:
                raise TemplateRunaway(
                    f"the model's chat template computes {left} ** {right}", param="messages"
                )
        return super().call_binop(context, operator, left, right)


class _Dict:
    """``dict(...)`` of templates, without the class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """``namespace(...)`` of templates, without names that lead into Python's own machinery."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that namespace(self=...) works
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class ChatTemplate:
    """A compiled template.

    Args:
        source: the jinja text.
        where: the file it came from, for messages.
        variables: what the template may read beside the request: ``bos_token`` and the like.
        cpu_limit_s: of each rendering; None: ``CPU_LIMIT_S``.
    Raises:
        CheckpointError: the template does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        where: str = "chat template",
        variables: Mapping[str, Any] | None = None,
        cpu_limit_s: float | None = None,
    ) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Metered, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_Dict(),
            namespace=_Namespace,
        )
        self.source = source
        try:
            self._template = environment.from_string(source)
            self.facts = _facts(environment, source)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateError) else ""
            raise CheckpointError(
                f"{where}: the chat template does not compile{line}: {error}",
                hint="fetch the file again, or repair it",
            ) from error
        self._thinking_name = next(
            (name for name in _THINKING_NAMES if re.search(rf"""(\.|["']){name}\b""", source)),
            _THINKING_NAMES[0],
        )
        self._variables = dict(variables or {})
        self._cpu_limit_s = CPU_LIMIT_S if cpu_limit_s is None else cpu_limit_s

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text.

        Args:
            extra: ``chat_template_kwargs`` of the request.
        Raises:
            TemplateRefused: with the template's reason and the first message it does not take.
            TemplateRunaway: it used too much time or built too much text.
        Cost: Python in the calling thread, for at most the CPU limit. Call it in a worker.
        """
        arguments = {
            **self._variables,
            **(extra or {}),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        messages = [self._in_its_names(message) for message in messages]
        _meter.start(self._cpu_limit_s)
        try:
            return self._run(messages, arguments)
        except FtdError:
            raise
        except Exception as error:
            index = self._first_refused(messages, arguments)
            raise TemplateRefused(
                f"the model's chat template refuses these messages at messages[{index}]: "
                f"{_reason(error)}",
                param=f"messages[{index}]",
            ) from error

    def _in_its_names(self, message: Message) -> Message:
        """``reasoning_content`` under the name this template reads it by."""
        if "reasoning_content" not in message or self._thinking_name == "reasoning_content":
            return message
        message = dict(message)
        message[self._thinking_name] = message.pop("reasoning_content")
        return message

    def _run(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        chars = 0
        for piece in self._template.generate(messages=messages, **arguments):
            chars += len(piece)
            _check_chars(chars)
            pieces.append(piece)
        return "".join(pieces)

    def _first_refused(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> int:
        """The message whose arrival makes the template refuse, by bisection."""
        good, bad = 0, len(messages)
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                self._run(messages[:middle], arguments)
                good = middle
            except TemplateRunaway:
                raise
            except Exception:
                bad = middle
        return max(0, bad - 1)


def _facts(environment: jinja2.Environment, source: str) -> TemplateFacts:
    variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
    named = {effort for effort in EFFORTS if re.search(f"""["']{effort}["']""", source)}
    return TemplateFacts(
        frozenset(variables), frozenset(named if "reasoning_effort" in variables else ())
    )


def _reason(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateError):
        return error.message or type(error).__name__
    return f"{type(error).__name__}: {error}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own ``tojson`` escapes HTML and non-ASCII text, as no model saw it in training."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold the name {name!r}")


def _check_chars(chars: float) -> None:
    if chars > MAX_CHARS:
        raise TemplateRunaway(
            f"the model's chat template builds {chars:,.0f} characters, {MAX_CHARS:,} is the most",
            param="messages",
        )
