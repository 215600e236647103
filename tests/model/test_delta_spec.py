"""Published configs of Qwen3-Next and Qwen3.5-MoE, and what is refused of them."""

from __future__ import annotations

import json

import pytest

from ftd.errors import CheckpointError, UnsupportedModel
from ftd.model.registry import architecture_for
from ftd.model.spec import AttentionSpec, DeltaSpec

LAYER_TYPES = (["linear_attention"] * 3 + ["full_attention"]) * 12


@pytest.fixture
def published(data_dir):
    """config.json of the tiny checkpoint of a family, with other values in its text part."""

    def read(family: str, **changes) -> dict:
        path = data_dir / "oracles" / family / "config.json"
        config = json.loads(path.read_text())
        config.get("text_config", config).update(changes)
        return config

    return read


def spec(config):
    return architecture_for(config).spec(config)


@pytest.fixture(params=["qwen3_next", "qwen3_5_moe"])
def family(request) -> str:
    return request.param


def test_three_delta_nets_then_attention_unless_the_config_lists_them(published, family):
    config = published(family, num_hidden_layers=48, full_attention_interval=4, layer_types=None)
    found = spec(config)
    kinds = [isinstance(layer.mixer, AttentionSpec) for layer in found.layers]
    assert kinds == [kind == "full_attention" for kind in LAYER_TYPES]
    assert len(found.delta_layers) == 36 and len(found.attention_layers) == 12
    assert (found.place(3), found.place(4), found.place(47)) == (0, 3, 11)
    assert spec(published(family, num_hidden_layers=48, layer_types=LAYER_TYPES)) == found


def test_the_delta_net_is_read(published, family):
    mixer = spec(published(family, linear_num_value_heads=6)).layers[0].mixer
    assert mixer == DeltaSpec(
        num_key_heads=2, num_value_heads=6, key_dim=16, value_dim=16, conv_width=4
    )
    assert mixer.channels == 2 * 2 * 16 + 6 * 16


def test_a_quarter_of_the_channels_turns(published, family):
    def rotary_dim(**changes):
        return spec(published(family, head_dim=256, **changes)).attention_layers[0].rope.rotary_dim

    assert rotary_dim() == 64
    where = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    assert rotary_dim(rope_parameters=where, rope_scaling=None) == 128
    assert rotary_dim(rope_parameters=None, partial_rotary_factor=None) == 64


def test_attention_has_a_gate_and_a_shared_expert_one_too(published, family):
    found = spec(published(family))
    attention = found.attention_layers[0]
    assert attention.gated and attention.qk_norm == "head"
    assert all(layer.mlp.shared.gated for layer in found.layers)


def test_only_qwen3_next_may_leave_its_routing_unnormalised(published):
    for family, normalised in (("qwen3_next", False), ("qwen3_5_moe", True)):
        found = spec(published(family, norm_topk_prob=False))
        assert found.layers[0].mlp.normalise_topk is normalised


def test_what_a_wrapper_says_beside_its_text_part_counts(published):
    config = published("qwen3_5_moe")
    assert config["text_config"].pop("eos_token_id") == 502
    del config["text_config"]["tie_word_embeddings"]
    config |= {"eos_token_id": [7, 8], "tie_word_embeddings": True}
    assert spec(config).eos_ids == (7, 8) and spec(config).tied_head


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"linear_num_value_heads": 3}, CheckpointError, "multiple of 2 key heads"),
        ({"linear_conv_kernel_dim": 1}, CheckpointError, "linear_conv_kernel_dim is 1"),
        ({"linear_key_head_dim": None}, CheckpointError, "linear_key_head_dim is missing"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "layer_types"),
        ({"layer_types": ["mamba"] * 3}, UnsupportedModel, "layer_types 'mamba'"),
        ({"head_dim": 4}, CheckpointError, "pairs of 4 channels"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_odd_values_are_refused_by_name(published, family, changes, error, said):
    with pytest.raises(error, match=said):
        spec(published(family, **changes))


def test_a_wrapper_without_its_text_part_is_refused(published):
    config = published("qwen3_5_moe")
    with pytest.raises(CheckpointError, match=r"text_config\.model_type is missing"):
        spec({**config, "text_config": {}})
    with pytest.raises(UnsupportedModel, match=r"text_config\.model_type 'llama'"):
        spec({**config, "text_config": {**config["text_config"], "model_type": "llama"}})
