"""What steps have been measured to cost, in the form in which the plan of the next one needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

_DECODE_STEPS = 31  # the last so many: a few that something disturbed do not move their median
_CHUNK_KEEP = 0.97
_SPREAD = 0.1  # chunk sizes must differ by this part of their mean for a line to be drawn


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of the last decode steps by rows, and of a prompt chunk as a line over its tokens.

    A chunk costs ``fixed_s + token_s * tokens`` on top of the decode rows it runs with. The fixed
    part is large where any chunk, however small, reads most of the experts.
    """

    decode_s: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    # Sums over the chunks measured, older ones weighing less: number, n, s, n², n·s
    chunks: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def measured(self, decode_rows: int, prompt_tokens: int, seconds: float) -> Rates:
        """The rates after one more step."""
        if prompt_tokens == 0:
            last = (*self.decode_s.get(decode_rows, ()), seconds)[-_DECODE_STEPS:]
            return replace(self, decode_s={**self.decode_s, decode_rows: last})
        s = max(seconds - (self.decode_step_s(decode_rows) or 0.0), 0.0)
        n = float(prompt_tokens)
        sums = zip(self.chunks, (1.0, n, s, n * n, n * s), strict=True)
        a, b, c, d, e = (_CHUNK_KEEP * old + new for old, new in sums)
        return replace(self, chunks=(a, b, c, d, e))

    def decode_step_s(self, rows: int) -> float | None:
        """Median seconds of a step of so many rows, of the nearest number of them measured."""
        if rows == 0 or not self.decode_s:
            return None
        return median(self.decode_s[min(self.decode_s, key=lambda known: abs(known - rows))])

    @property
    def chunk_tokens(self) -> float:
        """The mean size of the chunks measured; 0: none yet."""
        count, n, *_ = self.chunks
        return n / count if count else 0.0

    @property
    def one_size(self) -> bool:
        """The chunks measured were too much alike to tell what another size would cost."""
        count, _, _, nn, _ = self.chunks
        mean = self.chunk_tokens
        return count == 0 or nn / count - mean**2 < (_SPREAD * mean) ** 2

    @property
    def line(self) -> tuple[float, float]:
        """``(fixed_s, token_s)`` of a chunk, by least squares; in proportion if of one size."""
        count, n, s, nn, ns = self.chunks
        assert count > 0, "no chunk measured"
        mean_n, mean_s = n / count, s / count
        if self.one_size:
            return 0.0, mean_s / mean_n
        slope = (ns / count - mean_n * mean_s) / (nn / count - mean_n**2)
        token_s = min(max(slope, 0.0), mean_s / mean_n)
        return mean_s - token_s * mean_n, token_s

    @property
    def token_s(self) -> float:
        """To compute one more token of a prompt; 0: no chunk measured yet."""
        return self.line[1] if self.chunk_tokens else 0.0
