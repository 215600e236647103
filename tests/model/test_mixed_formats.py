"""One checkpoint in which every module has a format of its own, and scales lie in other files.

It has to compute what the same checkpoint computes with all of its weights written out as float32.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from lone_model import LoneModel
from oracle_check import Oracle
from safetensors.torch import load_file, save_file

from ftd.kernels.cpu import native
from ftd.kernels.formats import PackedMatrix
from ftd.kernels.reference import TorchOps

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from packed_weights import ENCODERS

# module → format, and what the checkpoint calls numbers, scale and factor
SPELLED = {
    "q_proj": ("fp8-one", ("weight", "weight_scale")),
    "k_proj": ("nvfp4", ("weight", "weight_scale", "weight_scale_2")),
    "o_proj": ("int4", ("weight_packed", "weight_scale")),
    "lm_head": ("fp8-row", ("weight", "weight_scale")),
    "embed_tokens": ("fp8", ("weight", "weight_scale_inv")),
    "gate_proj": ("mxfp4", ("weight_packed", "weight_scale")),
    "up_proj": ("mxfp4", ("weight_packed", "weight_scale")),
    "down_proj": ("fp8", ("weight", "weight_scale_inv")),
}
UNREAD = {"model.layers.0.self_attn.k_scale": torch.tensor(1.0)}


def encoded(fmt: str, rows: int, columns: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Numbers, scales and factor as stored, and the weights: of about the usual spread."""
    numbers, scale, factor, weights = ENCODERS["fp8-row" if fmt == "fp8-one" else fmt](
        rows, columns
    )
    if fmt == "fp8-one":
        scale = scale[0, 0]
        weights = numbers.float() * scale
    if fmt == "int4":
        numbers = numbers.view(torch.int32)
    return [numbers, scale] + ([] if factor is None else [factor.squeeze()]), weights


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, data_dir) -> tuple[Path, Path]:
    torch.manual_seed(4)
    source = data_dir / "oracles" / "qwen3_moe-window"
    folder = tmp_path_factory.mktemp("mixed")
    mixed, wide = (Path(shutil.copytree(source, folder / name)) for name in ("mixed", "wide"))
    tensors: dict[str, torch.Tensor] = {}
    for shard in source.glob("*.safetensors"):
        if shard.name.startswith("model"):
            tensors |= load_file(shard)
    files: list[dict[str, torch.Tensor]] = [dict(UNREAD), {}]  # numbers in one, scales in another
    written: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module = name.split(".")[-2]
        if module not in SPELLED or "mlp.gate." in name:
            files[0][name] = tensor
            written[name] = tensor
            continue
        fmt, suffixes = SPELLED[module]
        parts, weights = encoded(fmt, *tensor.shape)
        # everything as loud as what it replaces
        change = 2.0 ** round(float((tensor.float().std() / weights.std()).log2()))
        if fmt == "mxfp4":
            parts[1] = (parts[1].int() + int(torch.tensor(change).log2())).to(torch.uint8)
        else:
            parts[-1] = (parts[-1].float() * change).to(parts[-1].dtype)
        stem = name.removesuffix("weight")
        for index, (suffix, part) in enumerate(zip(suffixes, parts, strict=True)):
            files[min(index, 1)][stem + suffix] = part.contiguous()
        files[1][stem + "input_scale"] = torch.tensor(1.0)
        written[name] = weights * change
    index: dict[str, str] = {}
    for path, contents in ((mixed, files), (wide, [written])):
        for shard in path.glob("model*"):
            shard.unlink()
        index = {}
        for number, part in enumerate(contents):
            save_file(part, path / f"model-{number}-of-9.safetensors")
            index |= dict.fromkeys(part, f"model-{number}-of-9.safetensors")
        text = json.dumps({"metadata": {}, "weight_map": index})
        (path / "model.safetensors.index.json").write_text(text)
    return mixed, wide


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_every_module_may_have_its_own_format(checkpoints, data_dir, kernels):
    ops = TorchOps() if kernels == "torch" else native.load()
    if ops is None:
        pytest.skip("the C++ kernels are not built")
    mixed, wide = (LoneModel(path, ops) for path in checkpoints)
    attention = mixed.model.layers[0].mixer
    assert isinstance(attention.out.weight, PackedMatrix)
    assert isinstance(mixed.model.head.weight, PackedMatrix)
    ids = Oracle(data_dir / "oracles" / "qwen3_moe-window").prompts[0].sequence
    found, expected = mixed.run(ids, [5, 1, 7]), wide.run(ids)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert torch.equal(found, mixed.run(ids))
    if kernels == "native":
        ops.close()
