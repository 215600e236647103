import os
from pathlib import Path

import pytest
import torch

from ftd.errors import BudgetExceeded
from ftd.kv.cache import KvCache
from ftd.model.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec

MIB = 2**20


def spec(*heads):
    layers = tuple(
        LayerSpec(AttentionSpec(8, n, 64, rope=None, softmax_scale=1.0), DenseSpec(16))
        for n in heads
    )
    return ModelSpec("test", 32, 100, layers, 1e-6, True, 1024, (0,))


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_layers_have_their_own_shape_and_their_own_memory():
    cache = KvCache(spec(2, 4), num_pages=3, page_tokens=5, dtype=torch.float32)
    assert [tuple(t.shape) for t in cache.k] == [(3, 5, 2, 64), (3, 5, 4, 64)]
    for i, tensor in enumerate([*cache.k, *cache.v]):
        assert tensor.is_contiguous() and not tensor.any()
        tensor.fill_(i + 1)
    assert [t.unique().tolist() for t in [*cache.k, *cache.v]] == [[1], [2], [3], [4]]
    cache.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_are_those_of_all_tensors_up_to_alignment(dtype):
    cache = KvCache(spec(2, 4), num_pages=3, page_tokens=16, dtype=dtype)
    tensors = [*cache.k, *cache.v]
    payload = sum(t.numel() * t.element_size() for t in tensors)
    assert payload <= cache.bytes < payload + 4096 * len(tensors)
    cache.close()


def test_untouched_pages_cost_no_memory_and_closing_gives_it_back():
    before = resident_bytes()
    cache = KvCache(spec(8, 8), num_pages=2**14, page_tokens=16, dtype=torch.bfloat16)
    assert cache.bytes == 2**30
    cache.k[0][0] = 1.0
    cache.v[1][-1] = 1.0
    assert resident_bytes() - before < 16 * MIB
    cache.k[0][: 2**12] = 1.0  # 64 MiB
    view = cache.k[0]
    assert resident_bytes() - before > 60 * MIB
    cache.close()
    assert resident_bytes() - before < 16 * MIB
    assert not view[0].any()


def test_a_cache_larger_than_any_memory_is_refused_with_its_size():
    with pytest.raises(BudgetExceeded, match=r"needs \S+ TiB") as refused:
        KvCache(spec(8), num_pages=2**40, page_tokens=16, dtype=torch.bfloat16)
    assert "--kv-tokens" in refused.value.hint
