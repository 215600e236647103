"""Profiles on disk: one file for each key, written whole or not at all.

A file that is cut, foreign, of another version or of another key is left out, with a line in the
log: measuring again costs seconds, believing it costs speed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from dataclasses import astuple
from pathlib import Path

import structlog

from ftd.errors import ConfigError
from ftd.experts.profile import Key, Profile, from_json, to_json

log = structlog.get_logger(__name__)

MOST_BYTES = 1 << 20  # a profile has a few thousand


class ProfileStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path_of(self, key: Key) -> Path:
        digest = hashlib.sha256(repr(astuple(key)).encode()).hexdigest()[:16]
        return self.folder / f"{key.experts.replace(' ', '-').replace('/', '-')}-{digest}.json"

    def find(self, key: Key) -> Profile | None:
        path = self.path_of(key)
        try:
            with path.open("rb") as file:
                profile = from_json(file.read(MOST_BYTES).decode())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            log.warning("profile.left_out", path=str(path), reason=str(error))
            return None
        if profile.key != key:
            log.warning("profile.left_out", path=str(path), reason=f"it is of {profile.key}")
            return None
        return profile

    def prepare(self) -> None:
        """Make the folder, before a measurement that could not be kept.

        Raises:
            ConfigError: it cannot be written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise self._refusal(error) from error

    def save(self, profile: Profile) -> Path:
        """Raises ConfigError: the folder cannot be written to."""
        path = self.path_of(profile.key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=".profile-")
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(to_json(profile))
                    file.flush()
                    os.fsync(file.fileno())
                Path(name).replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(name).unlink()
                raise
        except OSError as error:
            raise self._refusal(error) from error
        return path

    def _refusal(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"profiles cannot be written to {self.folder}: {error.strerror}",
            hint="name another folder with --profile-dir",
        )
