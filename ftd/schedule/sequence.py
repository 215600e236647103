"""A request inside the engine: its tokens, and the pages that hold their keys and values."""

from __future__ import annotations

from array import array

from ftd.engine.api import EngineRequest
from ftd.schedule.policy import SequenceView


class Sequence:
    """Prompt and output are one run of tokens, of which the first ``computed`` have KV.

    What is left is *pending*: a whole prompt at first, one token while decoding, and all of it
    again when a preempted sequence comes back.
    """

    __slots__ = ("arrival", "computed", "ids", "pages", "passed_over", "request", "reused")

    def __init__(self, request: EngineRequest, arrival: int) -> None:
        self.request = request
        self.arrival = arrival  # rank among all requests: keeps its place when preempted
        self.ids = array("i", request.prompt_ids)
        self.pages = array("i")
        self.computed = 0
        self.reused: int | None = None  # prompt tokens found cached when it first ran
        self.passed_over = 0  # steps with prompt work in which it had none

    @property
    def key(self) -> str:
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output_tokens(self) -> int:
        return len(self.ids) - self.prompt_tokens

    @property
    def pending(self) -> int:
        return len(self.ids) - self.computed

    def start(self, pages: array[int], page_tokens: int) -> None:
        """Begin with the pages of a known beginning."""
        self.pages = pages
        self.computed = len(pages) * page_tokens
        self.passed_over = 0

    def leave(self) -> array[int]:
        """Give up all pages, for the caller to release; all tokens are pending again."""
        pages, self.pages, self.computed = self.pages, array("i"), 0
        return pages

    def view(self, exclusive_pages: int) -> SequenceView:
        return SequenceView(
            key=self.key,
            arrival=self.arrival,
            prompt_tokens=self.prompt_tokens,
            tokens=len(self.ids),
            computed=self.computed,
            pages=len(self.pages),
            exclusive_pages=exclusive_pages,
            passed_over=self.passed_over,
            waits_for=self.request.copies_of,
        )

    def view_after(self, tokens: int, pages: int, idle_pages: int) -> SequenceView:
        """As it would be, were it started with what the prefix tree knows of it."""
        return SequenceView(
            key=self.key,
            arrival=self.arrival,
            prompt_tokens=self.prompt_tokens,
            tokens=len(self.ids),
            computed=tokens,
            pages=pages,
            exclusive_pages=idle_pages,
        )
