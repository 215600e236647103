"""Philox4x32-10: a random number that is a function of a seed and a position, nothing else.

A draw can then be repeated whatever ran before it and whatever runs beside it.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

_WORD = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # what the key grows by each round


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Four 32-bit words, after ten rounds."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        x, y = _M0 * a, _M1 * c
        a, b, c, d = (y >> 32) ^ b ^ k0, y & _WORD, (x >> 32) ^ d ^ k1, x & _WORD
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return a, b, c, d


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1), its two ends left out. ``seed`` counts modulo 2**64."""
    key = (seed & _WORD, seed >> 32 & _WORD)
    word = philox4x32((position & _WORD, position >> 32 & _WORD, 0, 0), key)[0]
    return (word + 0.5) / 2**32
