"""The real architecture on whole checkpoints: what lands in memory is what safetensors reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ftd.checkpoint import load
from ftd.checkpoint.headers import check, read_checkpoint
from ftd.checkpoint.load import load_weights
from ftd.checkpoint.source import resolve
from ftd.experts.host_pool import HostPool
from ftd.kernels.decode import bias
from ftd.kernels.formats import MatrixLayout
from ftd.model.architecture import Part
from ftd.model.registry import architecture_for
from ftd.model.spec import MoeSpec

TINY = sorted((Path(__file__).parents[1] / "data" / "oracles").glob("*/config.json"))


@pytest.mark.parametrize("aside_bytes", [0, load.ASIDE_BYTES])
@pytest.mark.parametrize(
    "path", [resolve("demo").path, *(file.parent for file in TINY)], ids=lambda p: p.name
)
def test_loaded_bytes_equal_those_of_the_safetensors_library(path: Path, aside_bytes, monkeypatch):
    monkeypatch.setattr(load, "ASIDE_BYTES", aside_bytes)
    checkpoint = read_checkpoint(path)
    architecture = architecture_for(checkpoint.config)
    spec = architecture.spec(checkpoint.config, checkpoint.generation_config)
    layout = check(checkpoint, architecture, spec)
    mlp = spec.layers[spec.moe_layers[0]].mlp
    assert isinstance(mlp, MoeSpec)
    pool = HostPool(len(spec.moe_layers), mlp.num_experts, layout, spec.moe_layers)
    dense = load_weights(checkpoint, architecture, spec, pool, lambda *_: None, lambda: False)

    want: dict[str, torch.Tensor] = {}
    for file in checkpoint.files:
        want |= load_file(file)
    used: set[str] = set()  # names, or what they begin with
    for name, tensor in dense.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, want[name]), name
        else:
            assert torch.equal(numbers_of(tensor.layout, tensor.data), stored(want, Part(name, ())))
        used.add(name.removesuffix("weight"))
    for layer in spec.moe_layers:
        for expert in range(mlp.num_experts):
            record = torch.from_numpy(pool.record(layer, expert))
            for name, part in architecture.expert_parts(spec, layer, expert).items():
                used |= {part.tensor.removesuffix("weight"), (part.apart or part.tensor)[:-6]}
                if name.endswith("_bias"):
                    found = bias(layout.matrices[name.removesuffix("_bias")], record)
                    assert torch.equal(found.view(torch.uint8), stored(want, part, torch.float32))
                else:
                    found = numbers_of(layout.matrices[name], record)
                    assert torch.equal(found, stored(want, part)), name
    ignored = (name for name in want if not name.startswith(tuple(used)))
    assert all(architecture.ignored(name) for name in ignored)
    pool.close()


def numbers_of(matrix: MatrixLayout, record: torch.Tensor) -> torch.Tensor:
    return record[matrix.offset : matrix.offset + matrix.data_bytes]


def stored(
    want: dict[str, torch.Tensor], part: Part, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The bytes of a part's numbers as the library reads them."""
    name = part.tensor
    if name not in want and part.apart:
        name, part = part.apart, Part(part.apart, ())
    blocks = f"{name}_blocks" in want
    spellings = (name, f"{name}_packed", f"{name}_blocks")
    numbers = next(want[spelling] for spelling in spellings if spelling in want)
    if part.index is not None:
        numbers = numbers[part.index]
    if part.transposed and not blocks:
        numbers = numbers.T
    if part.rows is not None:
        numbers = numbers[part.rows[0] : part.rows[1] : part.step]
    return numbers.contiguous().to(dtype or numbers.dtype).flatten().view(torch.uint8)
