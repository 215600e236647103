"""What the published configs of families become: sizes, names, and what is refused.

``releases.json`` holds them, with the number of parameters that is stated for each release.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ftd.errors import CheckpointError, UnsupportedModel
from ftd.kernels.activation import SILU
from ftd.model.registry import ARCHITECTURES, architecture_for
from ftd.model.spec import SharedSpec

DATA = Path(__file__).parents[1] / "data"
# config.json as published, keys that mean nothing to inference left out
RELEASES = {
    name: release["config"]
    for name, release in json.loads((DATA / "releases.json").read_text()).items()
}
BILLIONS = {
    name: release["billions"]
    for name, release in json.loads((DATA / "releases.json").read_text()).items()
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
    stacked: dict[str, tuple[int, ...]] = {}  # by name: parts of one tensor count once
    for layer in s.moe_layers:
        for expert in range(s.layers[layer].mlp.num_experts):
            for part in architecture.expert_parts(s, layer, expert).values():
                stacked[part.tensor] = part.shape
    count += sum(map(math.prod, stacked.values()))
    assert round(count / 1e9, 2) == BILLIONS[release]


class TestQwen2Moe:
    def test_biases_shared_expert_and_its_gate(self):
        architecture, s = one_layer("Qwen/Qwen1.5-MoE-A2.7B")
        assert s.layers[0].mlp.shared == SharedSpec(5632, gated=True)
        assert not s.layers[0].mlp.normalise_topk
        names = architecture.dense_tensors(s)
        assert names["model.layers.0.mlp.shared_expert_gate.weight"] == (1, 2048)
        assert names["model.layers.0.mlp.shared_expert.down_proj.weight"] == (2048, 5632)
        biases = {name.split(".")[4] for name in names if name.endswith("bias")}
        assert biases == {"q_proj", "k_proj", "v_proj"}

    def test_window_is_off_in_releases(self):
        assert spec("Qwen/Qwen1.5-MoE-A2.7B").layers[0].attention.window is None

    @pytest.mark.parametrize("below", [0, 3, 28])
    def test_windowed_layers_are_those_of_transformers(self, below):
        transformers = pytest.importorskip("transformers")
        changes = {"use_sliding_window": True, "max_window_layers": below}
        config = {**RELEASES["Qwen/Qwen1.5-MoE-A2.7B"], **changes}
        theirs = transformers.Qwen2MoeConfig(**config).layer_types
        ours = spec("Qwen/Qwen1.5-MoE-A2.7B", **changes).layers
        windows = [layer.attention.window for layer in ours]
        assert windows == [32768 if kind == "sliding_attention" else None for kind in theirs]


class TestMixtral:
    def test_names_of_experts(self):
        architecture, s = one_layer("mistralai/Mixtral-8x7B-Instruct-v0.1")
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
        s = spec("mistralai/Mixtral-8x7B-Instruct-v0.1", sliding_window=4096)
        assert {layer.attention.window for layer in s.layers} == {4096}


class TestOlmoe:
    def test_norms_go_over_all_heads(self):
        architecture, s = one_layer("allenai/OLMoE-1B-7B-0924", num_key_value_heads=4)
        names = architecture.dense_tensors(s)
        assert names["model.layers.0.self_attn.q_norm.weight"] == (2048,)
        assert names["model.layers.0.self_attn.k_norm.weight"] == (512,)

    def test_clipped_attention_is_refused(self):
        with pytest.raises(UnsupportedModel, match=r"clip_qkv is 8\.0"):
            spec("allenai/OLMoE-1B-7B-0924", clip_qkv=8.0)


class TestGraniteMoe:
    def test_multipliers(self):
        s = spec("ibm-granite/granite-3.1-1b-a400m-instruct")
        assert (s.embedding_scale, s.residual_scale, s.logit_scale) == (12.0, 0.22, 6.0)
        assert s.layers[0].attention.softmax_scale == 0.015625 and s.tied_head

    def test_experts_are_stacked_gate_first(self):
        architecture, s = one_layer("ibm-granite/granite-3.1-1b-a400m-instruct")
        parts = architecture.expert_parts(s, 0, 3)
        assert parts["gate"].rows == (0, 512) and parts["up"].rows == (512, 1024)
        assert parts["gate"].tensor == parts["up"].tensor
        assert {part.index for part in parts.values()} == {3}


class TestGptOss:
    def test_window_in_every_other_layer(self):
        s = spec("openai/gpt-oss-20b")
        assert [layer.attention.window for layer in s.layers] == [128, None] * 12
        assert spec("openai/gpt-oss-20b", layer_types=None) == s

    def test_biases_sinks_and_activation(self):
        architecture, s = one_layer("openai/gpt-oss-20b", layer_types=["full_attention"])
        names = architecture.dense_tensors(s)
        assert names["model.layers.0.self_attn.sinks"] == (64,)
        assert names["model.layers.0.mlp.router.bias"] == (32,)
        assert sum(name.endswith("_proj.bias") for name in names) == 4
        activation = s.layers[0].mlp.activation
        assert (activation.limit, activation.alpha, activation.shift) == (7.0, 1.702, 1.0)
        assert activation != SILU and s.layers[0].mlp.bias

    def test_context_and_scale_are_those_of_yarn(self):
        s = spec("openai/gpt-oss-20b")
        assert s.context == 131072
        assert s.layers[0].attention.rope.scale == pytest.approx(0.1 * math.log(32) + 1)

    def test_layers_of_a_kind_we_do_not_have(self):
        kinds = ["chunked_attention", "full_attention"] * 12
        with pytest.raises(UnsupportedModel, match="chunked_attention"):
            spec("openai/gpt-oss-20b", layer_types=kinds)
        with pytest.raises(CheckpointError, match="a list of 24 values"):
            spec("openai/gpt-oss-20b", layer_types=["full_attention"])


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_experts_per_tok"])
def test_missing_keys_are_named(release, key):
    config = dict(RELEASES[release])
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], key: None}
    with pytest.raises(CheckpointError, match=rf"config.json: [a-z_.]*{key} is missing"):
        architecture_for(config).spec({**config, key: None})
