"""The kernels of AVX512-BF16 and AMX on emulated instructions: the tests of the formats, again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import emulated_library
import pytest
from test_dealt_rows import THREADS, test_threads_change_no_bit  # noqa: F401
from test_native_formats import (  # noqa: F401
    seeded,
    test_down_may_have_another_format,
    test_each_code_counts,
    test_each_scale_counts,
    test_linear_matches_the_decoded_matrix,
    test_moe_matches_reference,
)

from ftd.kernels.cpu import native
from ftd.kernels.cpu.library import Library
from ftd.kernels.cpu.native import NativeOps

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or not Library().isas().get("avx2"), reason="no g++ or no AVX2"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated_library.build(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module", params=["avx512bf16", "amx"])
def ops(request: pytest.FixtureRequest, library: Path) -> Iterator[NativeOps]:
    ops = native.load(request.param, threads=2, library=library)
    assert ops is not None
    yield ops
    ops.close()


@pytest.fixture(scope="module", params=["avx512bf16"])
def pools(request: pytest.FixtureRequest, library: Path) -> Iterator[list[NativeOps]]:
    pools = [native.load(request.param, threads=count, library=library) for count in THREADS]
    yield [ops for ops in pools if ops]
    for ops in pools:
        assert ops is not None
        ops.close()
