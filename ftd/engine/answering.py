"""A request in the engine: its sequence, and what is remembered beside the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ftd.engine.api import EngineRequest, Finish, Output, TokenLogprob
from ftd.engine.sampling import Draw, SamplingState, token_logprob
from ftd.kv.anchors import Anchor, Ended, Resumed
from ftd.schedule.sequence import Sequence


@dataclass(slots=True)
class Answering:
    sequence: Sequence
    sampling: SamplingState
    scores: list[TokenLogprob | None] = field(default_factory=list)  # of the prompt, if asked for
    announced: bool = False  # reused_tokens and prompt_logprobs have gone out
    served: int = 0  # the step in which it last ran beside a pass
    resumed: Resumed | None = None

    @property
    def key(self) -> str:
        return self.sequence.key

    @property
    def request(self) -> EngineRequest:
        return self.sequence.request

    @property
    def wants_scores(self) -> bool:
        return self.request.prompt_logprobs is not None

    @property
    def scoring(self) -> bool:
        """The prompt's own tokens are still to be judged: all of them are computed."""
        return self.wants_scores and not self.announced

    @property
    def reusable(self) -> int | None:
        """Tokens that may be found cached, at most; None: all."""
        return 0 if self.scoring else None

    def drawing(self, tokens: int) -> SamplingState | None:
        """How the token after the next ``tokens`` is drawn; None while more of the prompt comes."""
        return self.sampling if tokens == self.sequence.pending else None

    def begins(self, ended: Ended, passed: Anchor | None) -> None:
        """It has what is known of its beginning.

        Args:
            ended: why the prefix tree's match did.
            passed: the last anchor within it.
        """
        self.sequence.reused = self.sequence.computed
        if self.sequence.pending == 1:
            ended = Ended.WHOLE
        elif self.wants_scores:
            ended = Ended.OFF
        elif ended is Ended.WHOLE:  # of what a state is kept for
            ended = Ended.STATE
        self.resumed = Resumed(ended, passed)

    def score(self, begin: int, logits: torch.Tensor) -> None:
        """Log-probabilities of the prompt: row i, of position ``begin`` + i, judges the next."""
        top = self.request.prompt_logprobs
        assert top is not None
        if not self.scores:
            self.scores.append(None)
        ids, end = self.sequence.ids, self.sequence.prompt_tokens
        for place, row in enumerate(logits, start=begin + 1):
            if place < end:
                self.scores.append(token_logprob(row, ids[place], top))

    def take(self, draw: Draw, most_output: int) -> Output:
        """Add a token.

        Args:
            most_output: tokens after which it ends in any case.
        """
        sequence, first = self.sequence, not self.announced
        sequence.ids.append(draw.token)
        self.announced = True
        return Output(
            self.request.request_id,
            (draw.token,),
            (draw.logprob,) if draw.logprob else (),
            tuple(self.scores) if first and self.wants_scores else None,
            sequence.reused if first else None,
            self.resumed if first else None,
            self._finish(draw.token, most_output),
        )

    def _finish(self, token: int, most_output: int) -> Finish | None:
        if token in self.request.eos_ids:
            return Finish.EOS
        if token in self.request.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if self.sequence.output_tokens >= most_output else None
