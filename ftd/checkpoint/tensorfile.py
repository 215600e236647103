"""The header of one safetensors file, read and checked.

8 bytes little-endian header length, that many bytes of JSON
``{name: {"dtype", "shape", "data_offsets": [begin, end]}}``, then the data without gaps.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftd.errors import CheckpointError, UnsupportedModel
from ftd.units import MiB

MAX_HEADER_BYTES = 100 * MiB  # the bound of the safetensors library itself
DOWNLOAD_AGAIN = "the copy is incomplete or damaged: download or copy it again"

# bits of one element
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells whether a file is still the one whose header was read."""

    size: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(status: os.stat_result) -> FileStamp:
        return FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    dtype: str  # as safetensors spells it: "BF16"
    shape: tuple[int, ...]
    file: Path
    begin: int  # of its data, from the start of the file
    nbytes: int


def read_header(file: Path) -> tuple[FileStamp, dict[str, TensorInfo]]:
    """Parse and check the header of one safetensors file.

    Raises:
        CheckpointError: naming file, tensor, and what was expected and found.
    """
    with open_regular(file) as fd:
        stamp = FileStamp.of(os.fstat(fd))
        try:
            first = os.read(fd, 8)
            length = int.from_bytes(first, "little")
            if stamp.size < 8 or length > min(MAX_HEADER_BYTES, stamp.size - 8):
                raise _bad_length(file, first, length, stamp.size)
            text = os.read(fd, length)
        except OSError as e:
            raise CheckpointError(f"{file} cannot be read: {e.strerror}") from e
    if len(text) != length:
        raise CheckpointError(
            f"{file}: the header should have {length} bytes, {len(text)} could be read"
        )
    return stamp, _parse_header(file, text, stamp.size)


def _bad_length(file: Path, first: bytes, length: int, size: int) -> CheckpointError:
    if first == b"version ":
        return CheckpointError(
            f"{file} holds a git-lfs pointer, not weights ({size} bytes)",
            hint="run git lfs pull in the model's directory, or download it with hf download",
        )
    if size < 8:
        return CheckpointError(
            f"{file} has {size} bytes, a safetensors file has at least 8", hint=DOWNLOAD_AGAIN
        )
    return CheckpointError(
        f"{file}: its first 8 bytes announce a header of {length} bytes, at most "
        f"{min(MAX_HEADER_BYTES, size - 8)} are possible in a file of {size} bytes",
        hint="this is not a safetensors file, or " + DOWNLOAD_AGAIN,
    )


def _parse_header(file: Path, text: bytes, size: int) -> dict[str, TensorInfo]:
    try:
        header = json.loads(text, object_pairs_hook=lambda pairs: _unique(file, pairs))
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{file}: the header is not valid JSON: {e}") from e
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is not a JSON object")
    header.pop("__metadata__", None)
    data = 8 + len(text)
    tensors = {name: _tensor(file, name, entry, data) for name, entry in header.items()}
    end = data
    for t in sorted(tensors.values(), key=lambda t: (t.begin, t.nbytes)):
        if t.begin != end:
            raise CheckpointError(
                f"{file}: the data of tensor {t.name} should begin at byte {end - data} of the "
                f"data, its header says {t.begin - data}",
                hint=DOWNLOAD_AGAIN,
            )
        end += t.nbytes
        if end > size:
            raise CheckpointError(
                f"{file} is cut off: tensor {t.name} ends at byte {end}, the file has {size} bytes",
                hint=DOWNLOAD_AGAIN,
            )
    if end != size:
        raise CheckpointError(
            f"{file} has {size} bytes, its tensors end at byte {end}: "
            f"{size - end} bytes belong to nothing",
            hint=DOWNLOAD_AGAIN,
        )
    return tensors


def _unique(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        name = next(n for n, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise CheckpointError(f"{file}: the header has {name} twice")
    return result


def _tensor(file: Path, name: str, entry: Any, data: int) -> TensorInfo:
    def refuse(said: str) -> CheckpointError:
        return CheckpointError(f"{file}: tensor {name} {said}", hint=DOWNLOAD_AGAIN)

    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise refuse("has no dtype, shape and data_offsets in the header") from None
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise refuse(f"has the impossible shape {shape!r}")
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise refuse(f"has the impossible data_offsets [{begin!r}, {end!r}]")
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise UnsupportedModel(f"{file}: tensor {name} has the unknown dtype {dtype!r}")
    nbytes = math.prod(shape) * bits // 8
    if nbytes != end - begin:
        raise refuse(
            f"of shape {shape} and dtype {dtype} needs {nbytes} bytes, its data_offsets "
            f"[{begin}, {end}] give {end - begin}"
        )
    return TensorInfo(name, dtype, tuple(shape), file, data + begin, nbytes)


@contextmanager
def open_regular(file: Path) -> Iterator[int]:
    """Descriptor of a file to read; a pipe or device, which could block, is refused."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as e:
        dangling = " (a link to nothing)" if file.is_symlink() else ""
        raise CheckpointError(f"{file} is missing{dangling}", hint=DOWNLOAD_AGAIN) from e
    except OSError as e:
        raise CheckpointError(f"{file} cannot be read: {e.strerror}") from e
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{file} is not a regular file")
        yield fd
    finally:
        os.close(fd)
