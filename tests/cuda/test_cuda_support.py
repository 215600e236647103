"""What the GPU does not compute is refused before anything is read, and named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftd.cuda.support import refuse_unsupported
from ftd.errors import UnsupportedModel
from ftd.kernels.activation import GPT_OSS
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.model.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec

MOE = MoeSpec(8, 2, 64, True)
PLAIN = expert_layout(FORMATS["bf16"], 128, 64)


def spec(moe: MoeSpec) -> ModelSpec:
    layer = LayerSpec(AttentionSpec(2, 1, 16, None, 0.25), moe)
    return ModelSpec("qwen3_moe", 128, 512, (layer,) * 2, 1e-6, True, 512, (1,))


def test_plain_numbers_are_computed():
    refuse_unsupported(spec(MOE), PLAIN, [FORMATS["bf16"], FORMATS["f32"]])


@pytest.mark.parametrize(
    ("layout", "dense", "moe", "said"),
    [
        (expert_layout(FORMATS["nvfp4"], 128, 64), "bf16", MOE, "stored as nvfp4"),
        (
            expert_layout(FORMATS["bf16"], 128, 64, down=FORMATS["int4"]),
            "fp8",
            MOE,
            "stored as fp8, int4",
        ),
        (PLAIN, "fp8-row", MOE, "stored as fp8-row"),
        (PLAIN, "bf16", replace(MOE, bias=True), "biases"),
        (PLAIN, "bf16", replace(MOE, activation=GPT_OSS), "activation"),
    ],
)
def test_the_rest_is_refused(layout, dense, moe, said):
    with pytest.raises(UnsupportedModel, match=said) as refusal:
        refuse_unsupported(spec(moe), layout, [FORMATS["bf16"], FORMATS[dense]])
    assert "--device cpu" in refusal.value.hint and "bf16, f16, f32" in refusal.value.hint
