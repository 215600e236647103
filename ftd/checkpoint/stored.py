"""How a checkpoint stores one matrix, told from the tensors that stand beside its name.

Which modules are quantised differs from one checkpoint to the next, and config.json says it in
several dialects that are not always right. The tensors decide: a matrix with a scale beside it is
quantised, in whatever file the scale is. What cannot be read exactly is refused by its name.

    X.weight                                          bf16, f16, f32
    X.weight, X.weight_scale_inv or X.weight_scale    fp8 by tiles, rows or as a whole
    X.weight, X.weight_scale, X.weight_scale_2        nvfp4 of ModelOpt
    X.weight_packed, X.weight_scale                   mxfp4 or int4 of compressed-tensors
    X.weight_packed, X.weight_scale, X.weight_global_scale    its nvfp4: the factor's reciprocal
    X_blocks, X_scales                                mxfp4 of gpt-oss, experts stacked
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ftd.checkpoint.tensorfile import DOWNLOAD_AGAIN, TensorInfo
from ftd.errors import CheckpointError, UnsupportedModel
from ftd.kernels.formats import FORMATS, WeightFormat, dtype_of
from ftd.model.architecture import Part
from ftd.units import format_count

Tensors = Mapping[str, TensorInfo]
Shape = tuple[int, ...]
# bytes as read → as kept, both uint8; what is kept may be a view, of any strides
Convert = Callable[["torch.Tensor"], "torch.Tensor"]

# what safetensors calls the numbers that need no scale
STORED: dict[str, WeightFormat] = {name.upper(): FORMATS[name] for name in ("bf16", "f16", "f32")}
WIDENED = {  # what few numbers may be stored as: they are kept as float32, exactly
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E8M0": "float8_e8m0fnu",
}
# beside a quantised matrix, and not needed: activations are not quantised here
UNUSED = ("input_scale", "input_global_scale", "weight_shape")
UNUSED_ANYWHERE = (".k_scale", ".v_scale", ".q_scale")  # of a quantised KV cache


@dataclass(frozen=True, slots=True)
class Section:
    """Bytes of one tensor that become one section of a record."""

    tensor: TensorInfo
    begin: int  # in the file
    nbytes: int  # there
    convert: Convert | None = None  # None: kept as they are


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    format: WeightFormat
    numbers: Section
    scale: Section | None = None
    factor: Section | None = None
    unused: tuple[str, ...] = ()  # names beside it that are not read

    @property
    def sections(self) -> list[Section]:
        return [s for s in (self.numbers, self.scale, self.factor) if s is not None]

    @property
    def names(self) -> set[str]:
        return {s.tensor.name for s in self.sections} | set(self.unused)

    @property
    def num_bytes(self) -> int:
        return sum(section.nbytes for section in self.sections)


def matrix_shape(part: Part) -> tuple[int, int]:
    """[out, in] of the matrix that a part is, out of the whole tensor."""
    rows, columns = _whole_shape(part)
    return _count_rows(part, rows), columns


def find_matrix(tensors: Tensors, path: Path, part: Part) -> StoredMatrix:
    """The tensors of one matrix, checked against the shape that the architecture asks for.

    Args:
        path: of the checkpoint, for messages.
    Raises:
        CheckpointError: a tensor is missing or has another shape.
        UnsupportedModel: a format that ftd does not read.
    """
    if part.apart and part.tensor not in tensors and f"{part.tensor}_blocks" not in tensors:
        part = Part(part.apart, matrix_shape(part))
    return _Finder(tensors, path, part).find()


def find_dense(tensors: Tensors, path: Path, name: str, shape: Shape) -> StoredMatrix:
    """A tensor that is no routed expert's. Linear layers may be quantised, nothing else."""
    if name.endswith(".weight") and len(shape) == 2:
        return find_matrix(tensors, path, Part(name, shape))
    info = present(tensors, path, name, shape)
    check_tensor(info, shape, STORED)
    return StoredMatrix(STORED[info.dtype], _all(info))


def find_vector(tensors: Tensors, path: Path, part: Part) -> Section:
    """One number for each row, kept as float32: an expert's bias."""
    info = present(tensors, path, part.tensor, part.shape)
    check_tensor(info, part.shape, WIDENED)
    return _select(info, part, partial(_widen, WIDENED[info.dtype]))


def present(tensors: Tensors, path: Path, name: str, shape: Shape) -> TensorInfo:
    info = tensors.get(name)
    if info is None:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {list(shape)} is missing from the "
            f"{format_count(len(tensors))} tensors of the checkpoint",
            hint="config.json and weights are of different models, or " + DOWNLOAD_AGAIN,
        )
    return info


def check_tensor(info: TensorInfo, shape: Shape, dtypes: Mapping[str, object]) -> None:
    if info.shape != shape:
        raise CheckpointError(
            f"{info.file}: tensor {info.name} has shape {list(info.shape)}, config.json asks for "
            f"{list(shape)}",
            hint="config.json and weights are of different models",
        )
    if info.dtype not in dtypes:
        raise unsupported(info, f"expected {', '.join(dtypes)}")


def unsupported(info: TensorInfo, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{info.file}: tensor {info.name} is stored as {info.dtype} {list(info.shape)}, {why}",
        hint="formats that ftd reads: " + ", ".join(FORMATS),
    )


class _Finder:
    """One matrix. ``whole`` counts all rows of the tensor it is part of."""

    def __init__(self, tensors: Tensors, path: Path, part: Part) -> None:
        self.tensors, self.path, self.part = tensors, path, part
        self.whole, self.columns = _whole_shape(part)
        self.rows = _count_rows(part, self.whole)
        self.stem = part.tensor.removesuffix("weight")

    def find(self) -> StoredMatrix:
        part, tensors = self.part, self.tensors
        if (blocks := tensors.get(f"{part.tensor}_blocks")) is not None:
            return self.stacked(blocks)
        if (packed := self.beside("weight_packed")) is not None:
            return self.packed(packed)
        weight = tensors.get(part.tensor)
        if weight is None:
            self.refuse_other_packing()
            weight = present(tensors, self.path, part.tensor, part.shape)
        if weight.dtype == "F8_E4M3":
            return self.fp8(weight)
        if weight.dtype == "U8" and self.beside("weight_scale_2") is not None:
            return self.nvfp4(weight, "weight_scale_2", _widen)
        return self.plain(weight)

    def beside(self, suffix: str) -> TensorInfo | None:
        has_suffix = self.part.tensor.endswith("weight")
        return self.tensors.get(self.stem + suffix) if has_suffix else None

    def need(self, suffix: str, beside: TensorInfo) -> TensorInfo:
        info = self.beside(suffix)
        if info is None:
            raise CheckpointError(
                f"{beside.file}: tensor {beside.name} is stored as {beside.dtype}, but its scale "
                f"{self.stem}{suffix} is in no file of the checkpoint",
                hint=DOWNLOAD_AGAIN,
            )
        return info

    def unused(self) -> tuple[str, ...]:
        return tuple(n for s in UNUSED if (n := self.stem + s) in self.tensors)

    def refuse_other_packing(self) -> None:
        if (words := self.beside("qweight")) is not None:
            raise unsupported(words, "the packing of GPTQ or AWQ")

    def plain(self, weight: TensorInfo) -> StoredMatrix:
        part = self.part
        check_tensor(weight, part.shape, STORED)
        if (scale := self.beside("weight_scale") or self.beside("weight_scale_inv")) is not None:
            raise unsupported(weight, f"which needs no scale, yet {scale.name} is there")
        fmt = STORED[weight.dtype]
        if not part.transposed:
            return StoredMatrix(fmt, _select(weight, part))
        one = weight.nbytes // weight.shape[0] if part.index is not None else weight.nbytes
        begin = weight.begin + (part.index or 0) * one
        turn = partial(_transpose, fmt.numbers, self.whole, part.rows or (0, self.whole), part.step)
        return StoredMatrix(fmt, Section(weight, begin, one, turn))

    def stacked(self, blocks: TensorInfo) -> StoredMatrix:
        fmt, experts = FORMATS["mxfp4"], self.part.shape[0]
        name = f"{self.part.tensor}_scales"
        self.check_columns(fmt, blocks)
        groups = self.columns // fmt.scale_columns
        shape = (experts, self.whole, groups)
        scales = present(self.tensors, self.path, name, shape)
        check_tensor(blocks, (*shape, fmt.scale_columns // 2), {"U8": None})
        check_tensor(scales, shape, {"U8": None})
        return StoredMatrix(fmt, _select(blocks, self.part), _select(scales, self.part))

    def packed(self, numbers: TensorInfo) -> StoredMatrix:
        scale = self.need("weight_scale", numbers)
        if numbers.dtype == "I32":
            return self.int4(numbers, scale)
        if scale.dtype == "F8_E4M3":
            return self.nvfp4(numbers, "weight_global_scale", _reciprocal)
        fmt = FORMATS["mxfp4"]
        self.check_columns(fmt, numbers)
        check_tensor(numbers, (self.rows, self.columns // 2), {"U8": None})
        check_tensor(scale, fmt.scale_shape(self.rows, self.columns), {"U8": None, "F8_E8M0": None})
        return StoredMatrix(fmt, _all(numbers), _all(scale), unused=self.unused())

    def int4(self, numbers: TensorInfo, scale: TensorInfo) -> StoredMatrix:
        fmt = FORMATS["int4"]
        self.check_columns(fmt, numbers)
        if (zero := self.beside("weight_zero_point")) is not None:
            raise unsupported(zero, "an asymmetric quantisation")
        if (order := self.beside("weight_g_idx")) is not None:
            raise unsupported(order, "groups of columns that are not neighbours")
        if numbers.shape != (self.rows, self.columns // 8):
            raise unsupported(numbers, f"expected {[self.rows, self.columns // 8]} of four bits")
        groups = self.columns // fmt.scale_columns
        kept = _all(scale)
        if len(scale.shape) == 2 and 0 < scale.shape[1] < groups and groups % scale.shape[1] == 0:
            kept = _all(scale, partial(_spread, scale.shape[1], groups // scale.shape[1]))
            groups = scale.shape[1]
        check_tensor(scale, (self.rows, groups), {"BF16": None})
        return StoredMatrix(fmt, _all(numbers), kept, unused=self.unused())

    def nvfp4(
        self, numbers: TensorInfo, factor_name: str, convert: Callable[..., torch.Tensor]
    ) -> StoredMatrix:
        fmt = FORMATS["nvfp4"]
        self.check_columns(fmt, numbers)
        scale, factor = self.need("weight_scale", numbers), self.need(factor_name, numbers)
        check_tensor(numbers, (self.rows, self.columns // 2), {"U8": None})
        check_tensor(scale, fmt.scale_shape(self.rows, self.columns), {"F8_E4M3": None})
        if factor.shape not in ((), (1,)) or factor.dtype not in WIDENED:
            raise unsupported(factor, "expected one number, " + ", ".join(WIDENED))
        as_it_is = convert is _widen and factor.dtype == "F32"
        kept = _all(factor, None if as_it_is else partial(convert, WIDENED[factor.dtype]))
        return StoredMatrix(fmt, _all(numbers), _all(scale), kept, self.unused())

    def fp8(self, numbers: TensorInfo) -> StoredMatrix:
        scale = self.beside("weight_scale_inv") or self.need("weight_scale", numbers)
        check_tensor(numbers, (self.rows, self.columns), {"F8_E4M3": None})
        tiled, by_row = FORMATS["fp8"], FORMATS["fp8-row"]
        grid = tiled.scale_shape(self.rows, self.columns)
        if scale.dtype not in WIDENED:
            raise unsupported(scale, "expected " + ", ".join(WIDENED))
        widen = partial(_widen, WIDENED[scale.dtype])
        if scale.shape == grid:
            return StoredMatrix(tiled, _all(numbers), _all(scale, widen), unused=self.unused())
        if scale.shape in ((self.rows, 1), (self.rows,)):
            return StoredMatrix(by_row, _all(numbers), _all(scale, widen), unused=self.unused())
        if scale.shape in ((), (1,), (1, 1)):
            each = partial(_repeat, WIDENED[scale.dtype], self.rows)
            return StoredMatrix(by_row, _all(numbers), _all(scale, each), unused=self.unused())
        raise unsupported(
            scale, f"expected {list(grid)} tiles of 128 x 128, {self.rows} rows, or one scale"
        )

    def check_columns(self, fmt: WeightFormat, numbers: TensorInfo) -> None:
        if self.columns % fmt.column_multiple:
            raise unsupported(
                numbers,
                f"{self.columns} columns are no multiple of the {fmt.column_multiple} of "
                f"{fmt.name}",
            )


def _whole_shape(part: Part) -> tuple[int, int]:
    shape = part.shape if part.index is None else part.shape[1:]
    rows, columns = shape
    return (columns, rows) if part.transposed else (rows, columns)


def _count_rows(part: Part, whole: int) -> int:
    first, end = part.rows or (0, whole)
    return -(-(end - first) // part.step)


def _all(info: TensorInfo, convert: Convert | None = None) -> Section:
    return Section(info, info.begin, info.nbytes, convert)


def _select(info: TensorInfo, part: Part, convert: Convert | None = None) -> Section:
    """The rows of a part out of a tensor of rows; experts stacked before them, or not."""
    begin, nbytes, shape = info.begin, info.nbytes, info.shape
    if part.index is not None:
        nbytes //= shape[0]
        begin += part.index * nbytes
        shape = shape[1:]
    row_bytes = nbytes // shape[0]
    if part.rows is not None:
        first, end = part.rows
        # one range for all rows that take turns: it is read once for both parts of it
        start = first // part.step * part.step
        begin += start * row_bytes
        nbytes = (end - start) * row_bytes
        if part.step > 1:
            turns = partial(_every, row_bytes, first - start, part.step)
            convert = partial(_then, turns, convert) if convert else turns
    return Section(info, begin, nbytes, convert)


def _then(first: Convert, second: Convert, stored: torch.Tensor) -> torch.Tensor:
    return second(first(stored))


def _every(row_bytes: int, first: int, step: int, stored: torch.Tensor) -> torch.Tensor:
    return stored.view(-1, row_bytes)[first::step]


def _transpose(
    dtype: str, whole: int, rows: tuple[int, int], step: int, stored: torch.Tensor
) -> torch.Tensor:
    turned = stored.view(dtype_of(dtype)).view(-1, whole).T[rows[0] : rows[1] : step]
    return turned.contiguous().flatten().view(torch.uint8)


def _widen(dtype: str, stored: torch.Tensor) -> torch.Tensor:
    return stored.view(dtype_of(dtype)).float().view(torch.uint8)


def _repeat(dtype: str, rows: int, stored: torch.Tensor) -> torch.Tensor:
    return stored.view(dtype_of(dtype)).float().repeat(rows).view(torch.uint8)


def _spread(groups: int, times: int, stored: torch.Tensor) -> torch.Tensor:
    """Two-byte scales of wider groups: each stands for so many."""
    wide = stored.view(torch.int16).view(-1, groups).repeat_interleave(times, 1)
    return wide.flatten().view(torch.uint8)


def _reciprocal(dtype: str, stored: torch.Tensor) -> torch.Tensor:
    return (1.0 / stored.view(dtype_of(dtype)).float()).view(torch.uint8)
