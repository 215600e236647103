"""A digest that tells one set of weights from another without reading all of them."""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from pathlib import Path

import orjson

from ftd.checkpoint.headers import Checkpoint
from ftd.checkpoint.tensorfile import TensorInfo

_SAMPLE_BYTES = 64  # in the middle and at the end of every tensor: training changes each of them


def checkpoint_digest(checkpoint: Checkpoint, *also: object) -> str:
    """Hex digest of config, names, shapes and samples of all tensors.

    Args:
        also: what else makes a difference, such as the type of activations.
    Raises:
        OSError: a file cannot be read.
    Cost: two small reads a tensor.
    """
    digest = blake2b(digest_size=20)
    digest.update(orjson.dumps([checkpoint.config, *map(str, also)], option=orjson.OPT_SORT_KEYS))
    by_file: dict[Path, list[TensorInfo]] = defaultdict(list)
    for name in sorted(checkpoint.tensors):
        by_file[checkpoint.tensors[name].file].append(checkpoint.tensors[name])
    for path in sorted(by_file):
        with path.open("rb") as file:
            for tensor in by_file[path]:
                digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}".encode())
                last = max(0, tensor.nbytes - _SAMPLE_BYTES)
                for at in (last // 2, last):
                    file.seek(tensor.begin + at)
                    digest.update(file.read(min(_SAMPLE_BYTES, tensor.nbytes)))
    return digest.hexdigest()
