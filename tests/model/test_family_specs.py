"""What the published configs of families become: sizes, names, and what is refused.

Parameter counts are those that the authors or the hub state for the release.
"""

from __future__ import annotations

import json
import math

import pytest

from ftd.errors import CheckpointError, UnsupportedModel
from ftd.kernels.activation import SILU
from ftd.model.registry import ARCHITECTURES, architecture_for
from ftd.model.spec import SharedSpec

_COMMON = {"hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False}
RELEASES = {
    "Qwen1.5-MoE-A2.7B": {
        **_COMMON,
        "model_type": "qwen2_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Mixtral-8x7B-v0.1": {
        **_COMMON,
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32000,
    },
    "OLMoE-1B-7B-0924": {
        **_COMMON,
        "model_type": "olmoe",
        "attention_bias": False,
        "clip_qkv": None,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "vocab_size": 50304,
    },
    "granite-3.1-1b-a400m-base": {
        **_COMMON,
        "model_type": "granitemoe",
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_size": 1024,
        "intermediate_size": 512,
        "logits_scaling": 6.0,
        "max_position_embeddings": 131072,
        "num_attention_heads": 16,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1500000,
        "tie_word_embeddings": True,
        "vocab_size": 49155,
    },
    "gpt-oss-20b": {
        **_COMMON,
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "vocab_size": 201088,
    },
}
PARAMETERS = {
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "OLMoE-1B-7B-0924": 6_919_161_856,
    "granite-3.1-1b-a400m-base": 1_334_628_352,
    "gpt-oss-20b": 20_914_757_184,
}


def spec(release: str, **changes):
    config = {**RELEASES[release], **changes}
    return architecture_for(config).spec(config)


def one_layer(release: str, **changes):
    changes = {"num_hidden_layers": 1, **changes}
    config = {**RELEASES[release], **changes}
    return ARCHITECTURES[config["model_type"]], architecture_for(config).spec(config)


@pytest.mark.parametrize("release", RELEASES)
def test_parameter_count_is_the_published_one(release):
    s = spec(release)
    architecture = ARCHITECTURES[s.model_type]
    count = sum(math.prod(shape) for shape in architecture.dense_tensors(s).values())
    stacked = {}  # by name: parts of one tensor count once
    for layer in s.moe_layers:
        for expert in range(s.layers[layer].mlp.num_experts):
            parts = architecture.expert_parts(s, layer, expert).values()
            stacked |= {part.tensor: part.shape for part in parts}
    assert count + sum(map(math.prod, stacked.values())) == PARAMETERS[release]


class TestQwen2Moe:
    def test_biases_shared_expert_and_its_gate(self):
        architecture, s = one_layer("Qwen1.5-MoE-A2.7B")
        assert s.layers[0].mlp.shared == SharedSpec(5632, gated=True)
        assert not s.layers[0].mlp.normalise_topk
        names = architecture.dense_tensors(s)
        assert names["model.layers.0.mlp.shared_expert_gate.weight"] == (1, 2048)
        assert names["model.layers.0.mlp.shared_expert.down_proj.weight"] == (2048, 5632)
        biases = {name.split(".")[4] for name in names if name.endswith("bias")}
        assert biases == {"q_proj", "k_proj", "v_proj"}

    def test_window_is_off_in_releases(self):
        assert spec("Qwen1.5-MoE-A2.7B").layers[0].attention.window is None

    @pytest.mark.parametrize("below", [0, 3, 28])
    def test_windowed_layers_are_those_of_transformers(self, below):
        transformers = pytest.importorskip("transformers")
        changes = {"use_sliding_window": True, "max_window_layers": below}
        config = {**RELEASES["Qwen1.5-MoE-A2.7B"], **changes}
        theirs = transformers.Qwen2MoeConfig(**config).layer_types
        ours = spec("Qwen1.5-MoE-A2.7B", **changes).layers
        windows = [layer.attention.window for layer in ours]
        assert windows == [32768 if kind == "sliding_attention" else None for kind in theirs]


class TestMixtral:
    def test_names_of_experts(self):
        architecture, s = one_layer("Mixtral-8x7B-v0.1")
        parts = architecture.expert_parts(s, 0, 7)
        at = "model.layers.0.block_sparse_moe"
        assert {name: part.tensor for name, part in parts.items()} == {
            "gate": f"{at}.experts.7.w1.weight",
            "up": f"{at}.experts.7.w3.weight",
            "down": f"{at}.experts.7.w2.weight",
        }
        assert f"{at}.gate.weight" in architecture.dense_tensors(s)
        assert s.layers[0].mlp.normalise_topk

    def test_a_window_counts_for_every_layer(self):
        s = spec("Mixtral-8x7B-v0.1", sliding_window=4096)
        assert {layer.attention.window for layer in s.layers} == {4096}


class TestOlmoe:
    def test_norms_go_over_all_heads(self):
        architecture, s = one_layer("OLMoE-1B-7B-0924", num_key_value_heads=4)
        names = architecture.dense_tensors(s)
        assert names["model.layers.0.self_attn.q_norm.weight"] == (2048,)
        assert names["model.layers.0.self_attn.k_norm.weight"] == (512,)

    def test_clipped_attention_is_refused(self):
        with pytest.raises(UnsupportedModel, match=r"clip_qkv is 8\.0"):
            spec("OLMoE-1B-7B-0924", clip_qkv=8.0)


class TestGraniteMoe:
    def test_multipliers(self):
        s = spec("granite-3.1-1b-a400m-base")
        assert (s.embedding_scale, s.residual_scale, s.logit_scale) == (12.0, 0.22, 6.0)
        assert s.layers[0].attention.softmax_scale == 0.015625 and s.tied_head

    def test_experts_are_stacked_gate_first(self):
        architecture, s = one_layer("granite-3.1-1b-a400m-base")
        parts = architecture.expert_parts(s, 0, 3)
        assert parts["gate"].rows == (0, 512) and parts["up"].rows == (512, 1024)
        assert parts["gate"].tensor == parts["up"].tensor
        assert {part.index for part in parts.values()} == {3}


class TestGptOss:
    def test_window_in_every_other_layer(self):
        s = spec("gpt-oss-20b")
        assert [layer.attention.window for layer in s.layers] == [128, None] * 12
        assert spec("gpt-oss-20b", layer_types=None) == s

    def test_biases_sinks_and_activation(self):
        architecture, s = one_layer("gpt-oss-20b", layer_types=["full_attention"])
        names = architecture.dense_tensors(s)
        assert names["model.layers.0.self_attn.sinks"] == (64,)
        assert names["model.layers.0.mlp.router.bias"] == (32,)
        assert sum(name.endswith("_proj.bias") for name in names) == 4
        activation = s.layers[0].mlp.activation
        assert (activation.limit, activation.alpha, activation.shift) == (7.0, 1.702, 1.0)
        assert activation != SILU and s.layers[0].mlp.bias

    def test_context_and_scale_are_those_of_yarn(self):
        s = spec("gpt-oss-20b")
        assert s.context == 131072
        assert s.layers[0].attention.rope.scale == pytest.approx(0.1 * math.log(32) + 1)

    def test_layers_of_a_kind_we_do_not_have(self):
        kinds = ["chunked_attention", "full_attention"] * 12
        with pytest.raises(UnsupportedModel, match="chunked_attention"):
            spec("gpt-oss-20b", layer_types=kinds)
        with pytest.raises(CheckpointError, match="a list of 24 values"):
            spec("gpt-oss-20b", layer_types=["full_attention"])


@pytest.mark.parametrize("release", RELEASES)
def test_survives_json_and_names_its_family(release):
    config = json.loads(json.dumps(RELEASES[release]))
    assert architecture_for(config).spec(config).model_type == config["model_type"]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_experts_per_tok"])
def test_missing_keys_are_named(release, key):
    with pytest.raises(CheckpointError, match=rf"config.json: {key} is missing"):
        spec(release, **{key: None})
