"""``/v1/completions``: text or token ids go on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from ftd.engine.api import EngineLimits, TokenLogprob
from ftd.errors import FtdError, RequestInvalid
from ftd.text.answer import Piece, Reading
from ftd.text.textmodel import TextModel

from .chat import usage_object
from .errors import error_object
from .fields import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_TOKENS,
    Fields,
    read_include_usage,
    read_sampling,
    read_stop_ids,
    read_stops,
    token_id,
)
from .front import Asked
from .generation import Job, Prompt, Usage, refuse_too_long, room_tokens
from .logprobs import completion_logprobs
from .stream import DONE, event

DEFAULT_MAX_TOKENS = 16  # the API's own default; chat has none


def read_completion(fields: Fields, asked: Asked) -> Completion:
    """Check every field and tokenize: what is returned can be submitted as it is."""
    limits, text = asked.served.engine.limits, asked.served.text
    if fields.raw("suffix"):
        raise RequestInvalid(
            "suffix asks to fill a gap, which this model was not made for", param="suffix"
        )
    logprobs = fields.whole("logprobs", 0, MAX_LOGPROBS)
    sampling = read_sampling(fields, text.defaults, limits.vocab, logprobs=logprobs)
    max_tokens = fields.whole("max_tokens", 0, MAX_TOKENS)
    fields.text("model")  # any name is served
    echo = fields.flag("echo")
    prompts = _read_prompts(fields, text, limits)
    copies = fields.whole("n", 1, MAX_CHOICES) or 1
    if len(prompts) * copies > MAX_CHOICES:
        raise RequestInvalid(
            f"{len(prompts)} prompts with n={copies} make {len(prompts) * copies} answers, "
            f"{MAX_CHOICES} is the most",
            param="n",
        )
    if (fields.whole("best_of", 1, MAX_CHOICES) or copies) > copies:
        raise RequestInvalid("best_of may not be larger than n", param="best_of")
    job = Job(
        prompts=prompts,
        copies=copies,
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        sampling=sampling,
        reading=Reading(read_stops(fields), empty=max_tokens == 0),
        eos_ids=frozenset() if fields.flag("ignore_eos") else text.eos_ids,
        stop_ids=read_stop_ids(fields, limits.vocab),
        prompt_logprobs=logprobs if echo else None,
    )
    stream = fields.flag("stream")
    usage = read_include_usage(fields)
    return Completion(asked, job, stream, echo=echo, include_usage=usage)


def _read_prompts(fields: Fields, text: TextModel, limits: EngineLimits) -> tuple[Prompt, ...]:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    value = fields.raw("prompt")
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise RequestInvalid(
            "prompt must be text, token ids, or a list of texts or of lists of token ids",
            param="prompt",
        )
    if not isinstance(value[0], str | list):
        value = [value]
    if len(value) > MAX_CHOICES:
        raise RequestInvalid(
            f"prompt has {len(value):,} prompts, {MAX_CHOICES} is the most", param="prompt"
        )
    for one in value:
        if isinstance(one, str):
            refuse_too_long(text.least_tokens(one), limits)
    prompts = tuple(_prompt(one, text, limits.vocab) for one in value)
    for prompt in prompts:
        room_tokens(len(prompt.ids), limits, param="prompt")
    return prompts


def _prompt(value: Any, text: TextModel, vocab: int) -> Prompt:
    if isinstance(value, str):
        return Prompt(text.encode(value, special_tokens=True), value)
    if isinstance(value, list):
        return Prompt([token_id(entry, vocab, "prompt") for entry in value])
    raise RequestInvalid("prompt mixes texts and token ids", param="prompt")


class Completion:
    """``dialect.Dialect`` of OpenAI completions."""

    def __init__(
        self,
        asked: Asked,
        job: Job,
        stream: bool,
        *,
        echo: bool,
        include_usage: bool,
    ) -> None:
        self.job = job
        self.stream = stream
        self._text = asked.served.text
        self._include_usage = include_usage
        self._envelope = {
            "id": asked.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.served.name,
        }
        self._echoes = [self._echo(prompt) for prompt in job.prompts] if echo else None

    def opening(self, told: int) -> Iterator[bytes]:
        # with logprobs the echo comes with the piece that has them
        shown = self._echoes is not None and self.job.prompt_logprobs is None
        for index in range(self.job.answers):
            yield self._chunk(index, self._echoed(index) if shown else "")

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        text = piece.text
        if self._echoes is not None and piece.prompt_logprobs is not None:
            text = self._echoed(index) + text
        if text or piece.finish or piece.logprobs:
            yield self._chunk(index, text, self._logprobs(index, piece), piece.finish)

    def beat(self) -> Iterator[bytes]:
        yield self._chunk(0, "")

    def closing(self, usage: Usage) -> Iterator[bytes]:
        if self._include_usage:
            yield event({**self._envelope, "choices": [], "usage": usage_object(usage)})
        yield DONE

    def failure(self, error: FtdError) -> Iterator[bytes]:
        yield event(error_object(error))

    def reply(self, answers: list[Piece], usage: Usage) -> dict[str, Any]:
        choices = [
            _choice(
                index,
                self._echoed(index) + answer.text,
                self._logprobs(index, answer),
                answer.finish,
            )
            for index, answer in enumerate(answers)
        ]
        return {**self._envelope, "choices": choices, "usage": usage_object(usage)}

    def _echo(self, prompt: Prompt) -> str:
        return self._text.decode(prompt.ids) if prompt.text is None else prompt.text

    def _echoed(self, index: int) -> str:
        return self._echoes[index // self.job.copies] if self._echoes is not None else ""

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any] | None:
        if self.job.sampling.logprobs is None:
            return None
        tokens = [entry.token for entry in piece.logprobs]
        shift = len(self._echoed(index))
        offsets = [shift + offset for offset in piece.offsets]
        logprobs: Sequence[TokenLogprob | None] = piece.logprobs
        if piece.prompt_logprobs is not None:
            ids = self.job.prompts[index // self.job.copies].ids
            tokens = [*ids, *tokens]
            offsets = [*self._prompt_offsets(ids), *offsets]
            logprobs = [*piece.prompt_logprobs, *logprobs]
        return completion_logprobs(self._text, logprobs, offsets, tokens)

    def _prompt_offsets(self, ids: Sequence[int]) -> Iterator[int]:
        detokenizer, offset = self._text.detokenizer(), 0
        for token in ids:
            yield offset
            offset += len(detokenizer.push(token))

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> bytes:
        body = {**self._envelope, "choices": [_choice(index, text, logprobs, finish)]}
        if self._include_usage:
            body["usage"] = None
        return event(body)


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
