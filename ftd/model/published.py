"""Reads the keys of published JSON files: each with its type, its bounds and a clear refusal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ftd.errors import CheckpointError, UnsupportedModel

_REQUIRED: Any = object()
_INT_LIMIT = 2**31 - 1  # what kernels count in


class Published:
    """A JSON file, or a dictionary in it. ``null`` counts as absent, as it does in transformers.

    Every read raises CheckpointError naming key, value and what is expected.
    """

    def __init__(
        self, config: Mapping[str, Any], file: str = "config.json", prefix: str = ""
    ) -> None:
        self._config = config
        self._file = file
        self._prefix = prefix  # "rope_scaling." inside that dictionary

    def __contains__(self, key: str) -> bool:
        return self._config.get(key) is not None

    def integer(
        self, key: str, default: Any = _REQUIRED, *, least: int = 1, most: int = _INT_LIMIT
    ) -> int:
        value = self._get(key, default)
        if type(value) is not int or not least <= value <= most:  # a bool is no number here
            beyond = type(value) is int and value > most
            up_to = f" to {most}" if beyond or most != _INT_LIMIT else ""
            self.refuse(key, f"a whole number from {least}{up_to}")
        return value

    def number(
        self, key: str, default: Any = _REQUIRED, *, above: float = 0.0, most: float = 1e30
    ) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not above < value <= most:  # NaN neither
            self.refuse(key, f"a number above {above:g}, at most {most:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def choice(self, key: str, allowed: Sequence[str], default: Any = _REQUIRED) -> str:
        """One of the values that ftd knows; another one makes the model unsupported."""
        value = self._get(key, default)
        if value not in allowed:
            raise UnsupportedModel(
                f"{self._file}: {self._prefix}{key} {value!r:.80} is not supported",
                hint=f"supported: {', '.join(allowed)}",
            )
        return value

    def choices(self, key: str, allowed: Sequence[str], length: int) -> list[str]:
        """A list of ``length`` values that ftd knows; others make the model unsupported."""
        values = self._get(key, _REQUIRED)
        if not isinstance(values, list) or len(values) != length:
            self.refuse(key, f"a list of {length} values")
        return [Published({key: v}, self._file, self._prefix).choice(key, allowed) for v in values]

    def indices(self, key: str, below: int) -> frozenset[int]:
        """Those of a list that lie in [0, ``below``); empty by default."""
        value = self._get(key, [])
        if not isinstance(value, list) or any(type(i) is not int for i in value):
            self.refuse(key, "a list of whole numbers")
        return frozenset(i for i in value if 0 <= i < below)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of them; empty by default."""
        value = self._get(key, [])
        ids = value if isinstance(value, list) else [value]
        if any(type(i) is not int or i < 0 for i in ids):
            self.refuse(key, "a token id or a list of token ids")
        return tuple(ids)

    def inner(self, key: str, also: Sequence[str] = ()) -> Published:
        """The dictionary under ``key``, empty by default.

        Args:
            also: keys that count for it where only this one has them.
        """
        value = self._get(key, {})
        if not isinstance(value, dict):
            self.refuse(key, "an object")
        outer = {k: self._config[k] for k in also if k in self and value.get(k) is None}
        return Published({**value, **outer}, self._file, f"{self._prefix}{key}.")

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise the CheckpointError of a key whose value cannot be right."""
        value = self._config.get(key)
        found = f"is {value!r:.80}" if value is not None else "is missing"
        raise CheckpointError(
            f"{self._file}: {self._prefix}{key} {found}, expected {expected}",
            hint=f"correct {self._file}, or download it again",
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        if value is None:
            if default is _REQUIRED:
                self.refuse(key, "a value: the model cannot be read without it")
            return default
        return value
