"""The text side of a checkpoint: tokenizer, chat template, eos ids, sampling defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from ftd.engine.api import Sampling
from ftd.errors import CheckpointError, RequestInvalid
from ftd.kv.anchors import Anchor

from .borders import Borders, find_borders
from .bound import TokenBound
from .conversation import Conversation
from .detokenize import Detokenizer, Vocabulary
from .dialects import Dialect, Markup, detect
from .echo import EchoMemory, Place, Turn, contexts
from .encoded import EncodedTexts
from .history import in_terms_of
from .messages import Message, rewrites
from .parse import OutputParser
from .splice import Frame, NotPlaced, Spliced, in_one_place, with_marks
from .template import ChatTemplate, TemplateRefused
from .template_files import load_templates, read_json, token_text

if TYPE_CHECKING:
    from .constrain import MakeConstraint


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as a prompt."""

    ids: list[int]
    pieces: Spliced  # that the ids were made from
    place: Place  # of its answer

    @property
    def tail(self) -> str:
        """Text at the end of the prompt, enough to tell how an answer begins."""
        tail = self.pieces[-1]
        assert isinstance(tail, str)
        return tail


class TextModel:
    """Text to tokens and back for one checkpoint. Every method may be called from any thread.

    Args:
        path: a directory in Hugging Face layout.
    Raises:
        CheckpointError: naming the file that is missing or broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tokenizer = _load_tokenizer(path / "tokenizer.json")
        self._vocabulary = Vocabulary(self._tokenizer)
        self._bound = TokenBound(self._tokenizer)
        self.vocab_size = self._tokenizer.get_vocab_size()  # the model's own may be larger
        tokenizer_config = read_json(path / "tokenizer_config.json")
        generation = read_json(path / "generation_config.json")
        self.eos_ids = self._eos_ids(read_json(path / "config.json"), generation, tokenizer_config)
        self._ends = [self.token_bytes(token).decode(errors="replace") for token in self.eos_ids]
        self.defaults = _sampling_defaults(generation)
        self._templates = load_templates(path, tokenizer_config)
        self._markups: dict[tuple[str, str | None], Markup] = {}  # by template and dialect
        self._borders: Borders | None = None
        self.echoes = EchoMemory()
        self._together: dict[tuple[str, str, bool, int], bool] = {}  # what templates do not part
        self._encoded = EncodedTexts(self.encode)
        from .constrain import ConstraintCompiler  # with torch, which nothing else here waits for

        self._constraints = ConstraintCompiler(self._vocabulary, self.eos_ids)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``.

        Args:
            special_tokens: add what the tokenizer puts around a text of its own (often a BOS). A
                rendered chat has them already.
        Cost: about 1 µs a byte, without the GIL: call it in a worker.
        """
        # the batch call gives the GIL away while it works, the single one does not
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
        return list(encoding.ids)

    def least_tokens(self, text: str) -> int:
        """``encode`` makes at least so many of it, told without doing it; 0 of a short one."""
        return self._bound.least_tokens(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens``: special tokens and ids beyond the tokenizer's have none."""
        return self._vocabulary.decode(tokens)

    def detokenizer(self) -> Detokenizer:
        """For one answer: its pieces joined equal ``decode`` of all its tokens."""
        return self._vocabulary.detokenizer()

    def token_bytes(self, token: int) -> bytes:
        """What ``token`` stands for, which need not be whole characters."""
        return self._vocabulary.token_bytes(token)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt of a chat, ending where the assistant's answer begins.

        Args:
            messages: from ``messages.normalise``.
            extra: further variables of the template, such as ``enable_thinking``.
            add_generation_prompt: False: it ends with the last message.
        Raises:
            RequestInvalid: there is no template, or it refuses every form of the messages.
        """
        template = self._template(with_tools=bool(tools))
        refusal: TemplateRefused | None = None
        for form in rewrites(messages):
            try:
                return template.render(
                    form, tools=tools, extra=extra, add_generation_prompt=add_generation_prompt
                )
            except TemplateRefused as error:
                refusal = refusal or error  # the first speaks of the messages as they were sent
        assert refusal is not None
        raise refusal

    def prompt(
        self,
        conversation: Conversation,
        dialect: str | None = None,
        check: Callable[[int], None] = lambda least_tokens: None,
    ) -> Rendered:
        """``render`` of a conversation, with thinking and past calls in the template's own terms,
        and past answers that are remembered as the tokens they were generated in.

        Args:
            dialect: how the model writes calls and thinking; None: as its template tells.
            check: told how many tokens it will have at least, before it is tokenized; may raise.
        """
        tools = conversation.declarations
        markup = self._markup(conversation, dialect)
        frame = Frame(markup.spelled, self._ends)
        facts = self._template(with_tools=bool(tools)).facts
        extra = {**conversation.thinking.variables(facts), **conversation.variables}
        read = {name: value for name, value in extra.items() if name in facts.variables}
        before = contexts(conversation.messages, tools, read)
        turns = self._remembered(conversation, markup, before)
        pieces = self._pieces(conversation.messages, tools, extra, frame, turns)
        check(sum(len(p) if not isinstance(p, str) else self.least_tokens(p) for p in pieces))
        ids: list[int] = []
        for piece in pieces:
            ids += self._encoded.ids(piece) if isinstance(piece, str) else piece
        tail = pieces[-1]
        assert isinstance(tail, str)
        return Rendered(ids, pieces, frame.place(before[-1], tail))

    def _remembered(
        self, conversation: Conversation, markup: Markup, before: Sequence[bytes]
    ) -> dict[int, Turn]:
        """Answers of the past by the number of their message, in order."""
        turns = {}
        # backwards: of a conversation that is forgotten bit by bit, the beginning should stay
        for i, message in reversed(list(enumerate(conversation.messages))):
            if message["role"] != "assistant":
                continue
            turn = self.echoes.find(message, before[i])
            if turn is not None and self._in_one_place(conversation, markup.spelled, message):
                turns[i] = turn
        return dict(reversed(turns.items()))

    def _in_one_place(self, conversation: Conversation, dialect: Dialect, message: Message) -> bool:
        text, num_calls = message["content"][:1], min(2, len(message.get("tool_calls", ())))
        if len(text) + num_calls < 2:
            return True
        tools = conversation.declarations
        key = self._template(with_tools=bool(tools)).source, dialect.name, bool(text), num_calls
        if key not in self._together:
            self._together[key] = in_one_place(
                lambda messages: self.render(in_terms_of(dialect, messages), tools=tools),
                text,
                num_calls,
            )
        return self._together[key]

    def _pieces(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        extra: Mapping[str, Any],
        frame: Frame,
        turns: dict[int, Turn],
    ) -> Spliced:
        while True:
            marked, answers = with_marks(messages, turns)
            try:
                text = self.render(in_terms_of(frame.dialect, marked), tools=tools, extra=extra)
                return frame.splice(text, answers)
            except NotPlaced as error:
                for answer in answers[error.number :]:  # those behind it rely on where it stands
                    self.echoes.forget(answer.turn)
                turns = dict(list(turns.items())[: error.number])
            except TemplateRefused:
                if not turns:
                    raise
                turns = {}

    def text_of(self, pieces: Spliced) -> str:
        """The whole text of a prompt, special tokens included."""
        return "".join(
            piece
            if isinstance(piece, str)
            else b"".join(map(self.token_bytes, piece)).decode(errors="replace")
            for piece in pieces
        )

    def parser(
        self, conversation: Conversation, prompt: str, dialect: str | None = None
    ) -> Callable[[], OutputParser]:
        """What makes a parser for each answer to ``prompt``.

        Args:
            dialect: how the model writes calls and thinking; None: as its template tells.
        """
        markup = self._markup(conversation, dialect)
        return partial(
            OutputParser,
            markup,
            tools=conversation.tools,
            thinking_open=markup.opens_thinking(prompt),
        )

    def prepare_constraints(self, vocab: int, dialect: str | None = None) -> None:
        """Make what every constraint needs, before requests wait for it. Cost: up to a second."""
        if "default" in self._templates:
            self._constraints.prepare(self._markup(Conversation([]), dialect), vocab)

    def constraint(
        self, conversation: Conversation, prompt: str, vocab: int, dialect: str | None = None
    ) -> MakeConstraint | None:
        """What makes a constraint for each answer to ``prompt``; None: any answer will do.

        Args:
            vocab: of the model.
            dialect: how the model writes calls and thinking; None: as its template tells.
        Raises:
            RequestInvalid: what the client insists on cannot be held.
        Cost: some ms for each new set of tools or schema; see ``prepare_constraints``.
        """
        markup = self._markup(conversation, dialect)
        thought = markup.thought(prompt, conversation.thinking.on)
        return self._constraints.constraint(
            markup, conversation.demand, conversation.tools, thought, vocab
        )

    def anchors(self, ids: Sequence[int]) -> tuple[Anchor, ...]:
        """Borders within a prompt that the chat template has written: where work may resume.

        Cost: some ms for the first call, then 1 µs for 200 tokens.
        """
        if self._borders is None:
            self._borders = self._find_borders()
        return self._borders.anchors(ids)

    def _find_borders(self) -> Borders:
        if "default" not in self._templates:
            return Borders()
        dialect = self._markup(Conversation([]), None).dialect
        return find_borders(
            lambda messages, **options: self.render(in_terms_of(dialect, messages), **options),
            self.encode,
            frozenset(self._tokenizer.get_added_tokens_decoder()),
        )

    def _markup(self, conversation: Conversation, dialect: str | None) -> Markup:
        template = self._template(with_tools=bool(conversation.declarations))
        markup = self._markups.get((template.source, dialect))
        if markup is None:
            added = {
                str(token.content): token_id
                for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            }
            markup = Markup(detect(template.source, added, dialect), added)
            self._markups[template.source, dialect] = markup
        return markup

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        if not self._templates:
            raise RequestInvalid(
                "this model has no chat template, so it cannot take messages",
                param="messages",
                hint="use /v1/completions, or put a chat_template.jinja beside the weights",
            )
        template = self._templates.get("tool_use") if with_tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise RequestInvalid(
                f"this model's chat templates are named {', '.join(self._templates)}, none default",
                param="messages",
            )
        return template

    def _eos_ids(self, *configs: Mapping[str, Any]) -> frozenset[int]:
        ids: set[int] = set()
        for config in configs:
            declared = config.get("eos_token_id")
            if declared is None and isinstance(config.get("text_config"), dict):
                declared = config["text_config"].get("eos_token_id")
            ids.update(_ints(declared))
            if (name := token_text(config.get("eos_token"))) is not None:
                token = self._tokenizer.token_to_id(name)
                ids.update(() if token is None else (token,))
        return frozenset(ids)


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise CheckpointError(
            f"{path.name} is missing in {path.parent}",
            hint="ftd reads the tokenizers format; save the tokenizer with save_pretrained",
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{path} is not a tokenizer: {error}", hint="fetch the file again"
        ) from error
    tokenizer.no_truncation()  # some files carry the settings of their training
    tokenizer.no_padding()
    return tokenizer


def _sampling_defaults(generation: Mapping[str, Any]) -> Sampling:
    """What generation_config.json says of sampling; what it leaves out or garbles stays as is."""
    base = Sampling()
    greedy = generation.get("do_sample") is False
    return Sampling(
        temperature=0.0 if greedy else _number(generation, "temperature", base.temperature),
        top_k=max(0, int(_number(generation, "top_k", base.top_k))),
        top_p=_number(generation, "top_p", base.top_p) or base.top_p,
        min_p=_number(generation, "min_p", base.min_p),
        repetition_penalty=(
            _number(generation, "repetition_penalty", base.repetition_penalty)
            or base.repetition_penalty
        ),
    )


def _number(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key)
    usable = isinstance(value, int | float) and math.isfinite(value) and value >= 0
    return float(value) if usable and value is not None else default


def _ints(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
