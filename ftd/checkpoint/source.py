"""Where a model's files are: the bundled demo, a directory, or the Hugging Face hub.

A hub model that lies complete in the cache is served without asking the network: a restart does
not depend on it, and does not change the weights. ``hf download OWNER/NAME`` brings an update.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ftd
from ftd.errors import FtdError, ModelNotFound

DEMO = "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SMALL_FILES = ["*.json", "*.jinja"]
_WEIGHT_FILES = ["*.safetensors"]
_NOT_NEEDED = ["*/*", "consolidated*"]  # second copies of the weights in other layouts

Progress = Callable[[int, int], None]  # done and total, in bytes


class NotDownloaded(ModelNotFound):
    """A hub id that a start would ask the hub for."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    name: str  # what the API calls the model unless --served-name says otherwise
    path: Path


def resolve(
    model: str,
    *,
    progress: Progress = lambda done, total: None,
    accept: Callable[[Path], object] = lambda path: None,
    download: bool = True,
) -> ModelSource:
    """Find the files of ``model``, downloading those of a hub id that the cache lacks.

    Args:
        model: "demo", a directory, or a hub id OWNER/NAME; a directory wins over a hub id.
        progress: called with bytes while downloading; may raise an FtdError to stop it.
        accept: called with a folder of the model's small files before weights are downloaded;
            what it raises ends the download.
        download: False: only look into the cache.
    Raises:
        ModelNotFound: nothing there, or the hub cannot be reached or refuses.
        NotDownloaded: the cache lacks it, and ``download`` is False.
    """
    if model == DEMO:
        return ModelSource(DEMO, Path(ftd.__file__).parent / "demo")
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSource(path.resolve().name, path)
    if path.exists():
        raise _not_a_directory(path)
    if _HUB_ID.fullmatch(model):
        return ModelSource(model, _hub_snapshot(model, progress, accept, download))
    raise ModelNotFound(
        f"model {model}: there is no such directory",
        hint="give a directory with config.json and *.safetensors, a hub id OWNER/NAME, or demo",
    )


def _not_a_directory(path: Path) -> ModelNotFound:
    inside = path.parent if path.parent != Path() else Path.cwd()
    return ModelNotFound(
        f"model {path}: this is a file, not a directory",
        hint=f"give the directory with config.json and *.safetensors, such as {inside}; "
        "GGUF and other single-file formats are not supported",
    )


def _hub_snapshot(
    model: str, progress: Progress, accept: Callable[[Path], object], download: bool
) -> Path:
    from huggingface_hub import constants, snapshot_download

    cache = constants.HF_HUB_CACHE

    def fetch(patterns: list[str], **options: Any) -> Path:
        return Path(
            snapshot_download(
                model, allow_patterns=patterns, ignore_patterns=_NOT_NEEDED, **options
            )
        )

    cached = _in_cache(fetch)
    if cached and _is_complete(cached):
        return cached
    if not download:
        if constants.HF_HUB_OFFLINE:
            raise _unreachable(model, cache, ConnectionError("offline"))
        raise NotDownloaded(
            f"model {model}: not downloaded yet, the cache {cache} has no complete copy",
            hint=f"ftd downloads it when it starts; or run: hf download {model}",
        )
    try:
        accept(fetch(_SMALL_FILES))
        path = fetch(_SMALL_FILES + _WEIGHT_FILES, tqdm_class=_reporting_bar(progress))
    except FtdError:
        raise  # ``accept`` or ``progress`` ended the download
    except Exception as e:  # network errors have the classes of whatever HTTP library the hub uses
        raise _unreachable(model, cache, e) from e
    if _lacks_shards(path):  # without network an unfinished copy comes back as if it were whole
        raise _unreachable(model, cache, ConnectionError("no answer"))
    return path


def _in_cache(fetch: Callable[..., Path]) -> Path | None:
    try:
        return fetch(_SMALL_FILES, local_files_only=True)
    except (OSError, ValueError):
        return None


def _is_complete(path: Path) -> bool:
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    small = (path / "config.json").exists() and (path / "tokenizer.json").exists()
    return small and (index.exists() or single.exists()) and not _lacks_shards(path)


def _lacks_shards(path: Path) -> bool:
    """Whether the index names files that are not there: a download did not get to its end."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return False
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return not all((path / name).exists() for name in names)
    except (ValueError, KeyError, AttributeError, TypeError):
        return False  # whole, but broken: reading the headers will say how


def _unreachable(model: str, cache: str, e: Exception) -> ModelNotFound:
    from huggingface_hub import constants, errors

    looked = f"no directory of this name, and no complete copy in the cache {cache}"
    if isinstance(e, errors.GatedRepoError):
        said, hint = (
            "the hub wants its conditions accepted first",
            (f"accept them at https://huggingface.co/{model}, then run: hf auth login"),
        )
    elif isinstance(e, errors.RepositoryNotFoundError):
        said, hint = (
            "the hub knows no such model, or it is private",
            ("check the spelling; for a private model run: hf auth login"),
        )
    elif isinstance(e, errors.HFValidationError):
        said, hint = f"not a valid hub id: {_first_line(e)}", "hub ids look like OWNER/NAME"
    elif isinstance(e, OSError) and e.errno is not None and not isinstance(e, ConnectionError):
        said, hint = f"the download failed: {e.strerror}", f"check the disk that holds {cache}"
    else:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _first_line(e)
        said, hint = (
            f"the hub cannot be reached ({why})",
            (
                f"on a machine with network run: hf download {model}, then copy the cache, "
                "or give a directory"
            ),
        )
    return ModelNotFound(f"model {model}: {said}; {looked}", hint=hint)


def _first_line(e: BaseException) -> str:
    while e.__cause__ is not None:  # the hub wraps the network's own words
        e = e.__cause__
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


def _reporting_bar(progress: Progress) -> type:
    """A progress bar for huggingface_hub that also reports the bytes of all files together."""
    from huggingface_hub.utils import tqdm

    class ReportingBar(tqdm):
        """Counts by itself: a bar that is not shown, as in a service, does not."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts_bytes = options.get("unit") == "B"
            self.done = int(options.get("initial") or 0)
            super().__init__(*args, **options)

        def update(self, n: float | None = 1) -> bool | None:
            self.done += int(n or 0)
            if self.counts_bytes and self.total:
                progress(self.done, int(self.total))
            return bool(super().update(n))

    return ReportingBar
