"""Answers held to a grammar while they are drawn: JSON of a schema, calls of the client's tools.

Compiling happens in workers, once for each grammar; the engine thread asks for masks. Whatever
cannot be held is refused before the engine hears of it, and what breaks on the way ends the answer
with an error: there is no way out into free text.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import orjson
import structlog

from ftd.engine.api import Constraint
from ftd.errors import RequestInvalid

from .conversation import Demand, Tool
from .declared import not_held
from .detokenize import Vocabulary
from .dialects import Head, Markup, Params, Thought
from .grammar import (
    HeldTool,
    answer_grammar,
    arguments_grammar,
    call_grammar,
    can_hold_calls,
)
from .held import GrammarError, Held, Rules, Tables, Watched, WatchedHeaders
from .schema import Schema, SchemaTooLarge, blamed, prepared, refusal
from .tool_grammar import lark_of

log = structlog.get_logger(__name__)

MAX_GRAMMARS = 64  # kept compiled; and of their sources:
MAX_GRAMMAR_BYTES = 8 * 1024 * 1024
MakeConstraint = Callable[[], Constraint]


class ConstraintCompiler:
    """Makes constraints for one tokenizer. Every method may be called from any thread but the loop.

    Args:
        eos_ids: what may end an answer.
    """

    def __init__(self, vocabulary: Vocabulary, eos_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._eos_ids = eos_ids
        self._lock = threading.Lock()  # of what follows
        self._tables: dict[tuple[frozenset[int], int], Tables] = {}
        self._kept: OrderedDict[bytes, tuple[Rules | RequestInvalid | None, int]] = OrderedDict()
        self._kept_bytes = 0

    def prepare(self, markup: Markup, vocab: int) -> None:
        """Make the tables now. Cost: see ``Tables``."""
        if self._eos_ids:
            self._tables_for(frozenset(markup.symbols), vocab)

    def constraint(
        self, markup: Markup, demand: Demand, tools: Sequence[Tool], thought: Thought, vocab: int
    ) -> MakeConstraint | None:
        """What makes a constraint for each answer; None: any answer will do.

        Args:
            tools: that the model is told of.
            vocab: of the model.
        Raises:
            RequestInvalid: naming the keyword of a schema, and where it stands.
        """
        if demand.schema is None and not tools:
            return None
        if not self._eos_ids:
            if demand.schema is not None or _insists(demand, tools):
                raise RequestInvalid(
                    "this model has no token that ends an answer, so none can be held to a schema",
                    param=demand.schema_param or demand.choice_param or "tools",
                )
            return None
        think = _think_tokens(markup)
        thinking = "open" if thought.open else "optional" if thought.optional else ""
        if thinking and think:
            thinking = "behind"
        rules = self._rules(markup, demand, tools, thinking, vocab)
        if rules is None:
            return None
        if rules.trigger is not None:
            return partial(WatchedHeaders if rules.calls else Watched, rules)
        return partial(Held, rules, thought, think)

    def _rules(
        self, markup: Markup, demand: Demand, tools: Sequence[Tool], thinking: str, vocab: int
    ) -> Rules | None:
        key = _key(markup, demand, tools, thinking, vocab)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return _unless_refused(self._kept[key][0])
        tables = self._tables_for(frozenset(markup.symbols), vocab)
        found: Rules | RequestInvalid | None
        try:
            found = _Compilation(tables, markup, self._eos_ids).rules(demand, tools, thinking)
        except RequestInvalid as error:
            found = _alone(error)
        self._keep(key, found)
        return _unless_refused(found)

    def _tables_for(self, special: frozenset[int], vocab: int) -> Tables:
        with self._lock:
            tables = self._tables.get((special, vocab))
            if tables is None:
                tables = Tables(self._vocabulary, special, self._eos_ids, vocab)
                self._tables[special, vocab] = tables
            return tables

    def _keep(self, key: bytes, found: Rules | RequestInvalid | None) -> None:
        size = len(key)
        with self._lock:
            if key in self._kept or size > MAX_GRAMMAR_BYTES:
                return
            self._kept[key] = found, size
            self._kept_bytes += size
            while len(self._kept) > MAX_GRAMMARS or self._kept_bytes > MAX_GRAMMAR_BYTES:
                _, (_, dropped) = self._kept.popitem(last=False)
                self._kept_bytes -= dropped


class _Compilation:
    """From what a client wants to rules."""

    def __init__(self, tables: Tables, markup: Markup, eos_ids: frozenset[int]) -> None:
        self._tables, self._markup, self._eos_ids = tables, markup, eos_ids

    def rules(self, demand: Demand, tools: Sequence[Tool], thinking: str) -> Rules | None:
        """None: nothing is insisted on, and nothing can be held."""
        tools = [t for t in tools if demand.tools is None or t.name in demand.tools]
        if demand.tools is not None and not tools:
            raise RequestInvalid(
                f"{demand.choice_param} allows none of the tools",
                param=demand.choice_param,
                hint="none says that nothing is to be called",
            )
        insisted = _insists(demand, tools)
        if not can_hold_calls(self._markup):
            if insisted:
                raise RequestInvalid(
                    f"calls of this model's dialect, {self._markup.dialect.name}, can neither be "
                    "forced nor held to a schema",
                    param=demand.choice_param or "tools",
                )
            tools = []
        schema = None if demand.must_call else self._schema(demand)
        if schema is None and not tools:
            return None
        for suspicious in (False, True):  # tools one by one only if not all are sound
            held = [self._tool(tool, suspicious=suspicious) for tool in tools]
            try:
                return self._together(schema, held, demand, insisted, thinking)
            except GrammarError as error:
                cause = error
        if insisted or schema is not None:
            raise RequestInvalid(
                f"schemas and tools make no grammar together: {cause}",
                param=demand.schema_param or "tools",
            ) from cause
        log.warning("tools.not_held", tools=len(tools), cause=str(cause))
        return None

    def _together(
        self,
        schema: Schema | None,
        tools: Sequence[HeldTool],
        demand: Demand,
        insisted: bool,
        thinking: str,
    ) -> Rules | None:
        markup, compiled = self._markup, self._tables.compile
        opening = markup.opening_token() if tools else None
        bare = bool(markup.dialect.bare)
        if schema is not None or demand.must_call:
            named = demand.tools is not None and len(demand.tools) == 1
            grammar = self._answer(schema, tools, thinking, one=named)
            return Rules(self._tables, compiled(grammar), unthinkable=opening)
        if not insisted and markup.dialect.channels:
            return self._behind_headers(tools)
        if opening is not None and not markup.dialect.channels and not (bare and insisted):
            return Rules(self._tables, compiled(call_grammar(markup, tools)), opening)
        if bare and not insisted:
            return None  # it would keep text from beginning as such calls do
        grammar = answer_grammar(markup, self._eos_ids, tools=tools, free=True, thinking=thinking)
        return Rules(self._tables, compiled(grammar), unthinkable=opening)

    def _behind_headers(self, tools: Sequence[HeldTool]) -> Rules | None:
        """Where every message has a header, only calls are watched."""
        form, ids = self._markup.dialect.call, _ids(self._markup)
        begin = self._markup.dialect.block[0]
        if not isinstance(form, Head) or not {begin, form.end[0]} <= ids.keys():
            return None
        return Rules(
            self._tables,
            trigger=ids[form.end[0]],
            calls={
                tool.name: self._tables.compile(
                    arguments_grammar(self._markup, self._eos_ids, tool)
                )
                for tool in tools
            },
            header_begins=ids[begin],
            header_name=form.name,
        )

    def _answer(
        self,
        schema: Schema | None,
        tools: Sequence[HeldTool],
        thinking: str = "",
        one: bool = False,
    ) -> str:
        return answer_grammar(
            self._markup, self._eos_ids, schema=schema, tools=tools, one=one, thinking=thinking
        )

    def _fails(self, schema: Schema | None, tools: Sequence[HeldTool] = ()) -> str | None:
        try:
            self._tables.compile(self._answer(schema, tools))
        except (GrammarError, ValueError) as error:
            return str(error)
        return None

    def _schema(self, demand: Demand) -> Schema | None:
        if demand.schema is None:
            return None
        schema = prepared(demand.schema or {"type": "object"}, demand.schema_param)
        if self._fails(schema):
            path, reason = blamed(schema, self._fails)
            raise refusal(demand.schema_param, path, reason)
        return schema

    def _tool(self, tool: Tool, *, suspicious: bool) -> HeldTool:
        """With as much of its schema as can be held; all of it if it is strict."""
        where = f"tool {tool.name}"
        try:
            if tool.grammar is not None:
                return self._free_form(tool, tool.grammar)
            held = HeldTool(tool.name, {"type": "object", **prepared(tool.parameters, where)})
            if tool.strict or suspicious:
                self._check(held, where)
            if tool.strict and (unheld := not_held(self._markup, held.schema)):
                raise refusal(where, *unheld)
            return held
        except RequestInvalid as error:
            if tool.strict or tool.grammar is not None:
                raise
            if isinstance(error, SchemaTooLarge):
                return HeldTool(tool.name, {"type": "object"})
        lenient = HeldTool(tool.name, {"type": "object", **tool.parameters}, lenient=True)
        return HeldTool(tool.name, {"type": "object"}) if self._fails(None, [lenient]) else lenient

    def _free_form(self, tool: Tool, grammar: tuple[str, str]) -> HeldTool:
        """Its text is of the grammar, if that can stand in this dialect's calls."""
        where = f"tool {tool.name}"
        try:
            text = lark_of(*grammar)
            self._tables.compile(text)
        except (ValueError, GrammarError) as error:
            raise RequestInvalid(f"{where}: its grammar: {error}", param=where) from error
        held = HeldTool(tool.name, tool.parameters, text=text)
        if grammar[0] == "regex" and not isinstance(self._markup.dialect.call, Params):
            (name,) = tool.parameters["properties"]
            pattern = {"type": "string", "pattern": f"^(?:{grammar[1]})$"}
            held = HeldTool(tool.name, {**tool.parameters, "properties": {name: pattern}})
        return HeldTool(tool.name, tool.parameters) if self._fails(None, [held]) else held

    def _check(self, tool: HeldTool, where: str) -> None:
        if self._fails(tool.schema):
            raise refusal(where, *blamed(tool.schema, self._fails))
        if why := self._fails(None, [tool]):
            raise RequestInvalid(f"{where}: {why}", param=where)


def _insists(demand: Demand, tools: Sequence[Tool]) -> bool:
    """Whether the client relies on how calls are made."""
    return demand.must_call or demand.tools is not None or any(tool.strict for tool in tools)


def _think_tokens(markup: Markup) -> tuple[int, int] | None:
    """Tokens that open and close thinking, if both are tokens."""
    think, ids = markup.dialect.think, _ids(markup)
    if think is None or think.open not in ids or think.close not in ids:
        return None
    return ids[think.open], ids[think.close]


def _ids(markup: Markup) -> dict[str, int]:
    """The tokens of markers that are one."""
    return {symbol: token for token, symbol in markup.symbols.items()}


def _key(*facts: Any) -> bytes:
    markup, demand, tools, *rest = facts
    return orjson.dumps(
        [
            [markup.dialect.name, sorted(markup.symbols)],
            [demand.schema, demand.schema_param, sorted(demand.tools or ()), demand.tools is None],
            [demand.must_call, demand.choice_param],
            [[tool.name, tool.parameters, tool.strict, tool.grammar] for tool in tools],
            *rest,
        ]
    )


def _unless_refused(found: Rules | RequestInvalid | None) -> Rules | None:
    if isinstance(found, RequestInvalid):
        raise _alone(found)
    return found


def _alone(error: RequestInvalid) -> RequestInvalid:
    """Without the traceback, whose frames hold the request."""
    return RequestInvalid(error.message, param=error.param, hint=error.hint)
