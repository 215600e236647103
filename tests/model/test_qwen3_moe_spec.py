"""What a published config.json becomes, and how a damaged one is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch

from ftd.errors import CheckpointError, UnsupportedModel
from ftd.kernels.reference import TorchOps
from ftd.model.registry import ARCHITECTURES, architecture_for
from ftd.model.spec import DenseSpec, MoeSpec

# config.json of Qwen3-30B-A3B as published (keys that mean nothing to inference left out)
RELEASE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
qwen3_moe = ARCHITECTURES["qwen3_moe"]


def spec(**changes):
    return qwen3_moe.spec({**RELEASE, **changes})


def without(*keys):
    return qwen3_moe.spec({k: v for k, v in RELEASE.items() if k not in keys})


class TestRelease:
    def test_numbers(self):
        s = spec()
        assert (s.hidden, s.vocab, len(s.layers), s.context) == (2048, 151936, 48, 40960)
        assert s.eos_ids == (151645,) and not s.tied_head and s.dtype == "bfloat16"
        assert set(s.moe_layers) == set(range(48))
        assert s.layers[0].mlp == MoeSpec(128, 8, 768, normalise_topk=True)
        attention = s.layers[47].attention
        assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 4, 128)
        assert attention.qk_norm and attention.window is None
        assert attention.rope.theta == 1e6 and attention.rope.rotary_dim == 128
        assert attention.softmax_scale == pytest.approx(1 / math.sqrt(128))
        assert s.kv_bytes_per_token == 96 * 1024  # shared knowledge of the release

    def test_parameter_count_is_the_published_one(self):
        s = spec()
        dense = sum(math.prod(shape) for shape in qwen3_moe.dense_tensors(s).values())
        expert = sum(math.prod(p.shape) for p in qwen3_moe.expert_parts(s, 3, 5).values())
        assert dense + 48 * 128 * expert == 30_532_122_624

    def test_tensor_names(self):
        s = spec()
        assert qwen3_moe.expert_parts(s, 3, 5)["down"].tensor == (
            "model.layers.3.mlp.experts.5.down_proj.weight"
        )
        names = qwen3_moe.dense_tensors(s)
        assert names["model.layers.0.mlp.gate.weight"] == (128, 2048)
        assert not any("bias" in name for name in names)

    def test_tied_head_is_not_read_and_not_a_stray_tensor(self):
        assert "lm_head.weight" in qwen3_moe.dense_tensors(spec())
        assert "lm_head.weight" not in qwen3_moe.dense_tensors(spec(tie_word_embeddings=True))
        assert qwen3_moe.ignored("lm_head.weight")
        assert not qwen3_moe.ignored("model.layers.0.mlp.shared_expert.up_proj.weight")


class TestSpellings:
    def test_eos_ids_of_both_files_in_order_and_once(self):
        s = qwen3_moe.spec(RELEASE, {"eos_token_id": [151643, 151645]})
        assert s.eos_ids == (151645, 151643)

    def test_rope_parameters_of_newer_files(self):
        config = {k: v for k, v in RELEASE.items() if k not in ("rope_theta", "rope_scaling")}
        newer = {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
        assert qwen3_moe.spec(newer).layers[0].attention.rope.theta == 5e6
        assert without("rope_theta").layers[0].attention.rope.theta == 10_000

    def test_dtype_of_newer_files(self):
        assert spec(torch_dtype=None, dtype="float32").dtype == "float32"
        assert without("torch_dtype").dtype == "bfloat16"

    def test_experts_as_transformers_saves_them_again(self):
        config = {k: v for k, v in RELEASE.items() if k != "num_experts"}
        assert qwen3_moe.spec({**config, "num_local_experts": 64}).layers[0].mlp.num_experts == 64

    def test_head_dim_defaults_to_an_equal_share_of_the_width(self):
        assert without("head_dim").layers[0].attention.head_dim == 64

    def test_topk_is_not_normalised_unless_said(self):
        assert not without("norm_topk_prob").layers[0].mlp.normalise_topk

    def test_window_counts_only_when_switched_on_and_then_everywhere(self):
        assert spec(sliding_window=4096).layers[0].attention.window is None
        s = spec(sliding_window=4096, use_sliding_window=True, max_window_layers=20)
        assert {layer.attention.window for layer in s.layers} == {4096}

    def test_dense_layers(self):
        s = spec(mlp_only_layers=[1, 3, 99], decoder_sparse_step=2, num_hidden_layers=6)
        assert s.moe_layers == (5,)
        assert s.layers[0].mlp == DenseSpec(6144)
        assert "model.layers.1.mlp.up_proj.weight" in qwen3_moe.dense_tensors(s)

    def test_attention_bias_is_on_all_four_projections(self):
        names = qwen3_moe.dense_tensors(spec(attention_bias=True, num_hidden_layers=1))
        assert sorted(n.split(".")[4] for n in names if n.endswith("bias")) == [
            "k_proj",
            "o_proj",
            "q_proj",
            "v_proj",
        ]

    def test_yarn_extends_the_context(self):
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        s = spec(rope_scaling=yarn)
        assert s.context == 131072 and s.layers[0].attention.rope.stretch is not None

    @pytest.mark.parametrize("name", ["", "-window", "-tied", "-unnormalised", "-mixed"])
    def test_agrees_with_the_class_of_transformers(self, name, data_dir):
        transformers = pytest.importorskip("transformers")
        directory = data_dir / "oracles" / f"qwen3_moe{name}"
        theirs = transformers.AutoConfig.from_pretrained(directory)
        ours = qwen3_moe.spec(json.loads((directory / "config.json").read_text()))
        attention = ours.layers[0].attention
        assert attention.window == theirs.sliding_window
        assert attention.rope.theta == theirs.rope_parameters["rope_theta"]
        assert attention.bias == theirs.attention_bias
        assert ours.tied_head == theirs.tie_word_embeddings


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"num_attention_heads": 0},
                "num_attention_heads is 0, expected a whole number",
            ),
            ({"hidden_size": "2048"}, "hidden_size is '2048', expected a whole number"),
            ({"hidden_size": 2048.0}, "hidden_size is 2048.0, expected a whole number"),
            ({"vocab_size": True}, "vocab_size is True, expected a whole number"),
            ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
            ({"num_hidden_layers": 10**9}, "expected a whole number from 1 to 1024"),
            ({"hidden_size": 10**18}, "expected a whole number from 1 to "),
            ({"num_experts_per_tok": 129}, "is 129, expected at most the number of experts, 128"),
            ({"num_key_value_heads": 5}, "expected a divisor of num_attention_heads, 32"),
            ({"head_dim": None, "hidden_size": 2050}, "head_dim is missing"),
            ({"head_dim": 127}, "head_dim is 127, expected an even number"),
            ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes', expected true or false"),
            ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number above 0"),
            ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a number above 0"),
            ({"rope_theta": 1}, "rope_theta is 1, expected a number above 1"),
            ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected an object"),
            ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor is missing"),
            ({"mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list of whole numbers"),
            ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', expected a token id"),
            ({"use_sliding_window": True}, "sliding_window is missing"),
            ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ],
        ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
    )
    def test_absurd_values(self, changes, words):
        with pytest.raises(CheckpointError) as caught:
            spec(**changes)
        assert words in caught.value.message and caught.value.hint

    def test_names_the_file_that_is_wrong(self):
        with pytest.raises(CheckpointError) as caught:
            qwen3_moe.spec(RELEASE, {"eos_token_id": -1})
        assert caught.value.message.startswith("generation_config.json: eos_token_id is -1")

    @pytest.mark.parametrize(
        "key",
        [
            "hidden_size",
            "max_position_embeddings",
            "moe_intermediate_size",
            "num_attention_heads",
            "num_experts",
            "num_experts_per_tok",
            "num_hidden_layers",
            "num_key_value_heads",
            "vocab_size",
        ],
    )
    def test_missing_keys(self, key):
        with pytest.raises(CheckpointError, match=rf"config.json: {key} is missing"):
            without(key)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type 'longrope'"),
            ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.type 'dynamic'"),
            ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
            ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype 'float8_e4m3fn'"),
        ],
    )
    def test_variants_we_do_not_have(self, changes, words):
        with pytest.raises(UnsupportedModel) as caught:
            spec(**changes)
        assert words in caught.value.message and "supported: " in caught.value.hint


class TestRegistry:
    def test_finds_the_architecture(self):
        assert architecture_for(RELEASE) is qwen3_moe

    def test_lists_what_is_supported(self):
        with pytest.raises(UnsupportedModel) as caught:
            architecture_for({"model_type": "llama"})
        assert "'llama'" in caught.value.message and "qwen3_moe" in caught.value.hint

    @pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": ["qwen3_moe"]}])
    def test_config_without_a_type(self, config):
        with pytest.raises(CheckpointError, match="model_type"):
            architecture_for(config)


def test_build_leaves_nothing_behind():
    """Fused matrices replace their parts: the caller's mapping is empty afterwards."""
    s = spec(num_hidden_layers=2, hidden_size=32, vocab_size=40, head_dim=8, num_experts=4,
             num_experts_per_tok=2, moe_intermediate_size=16)  # fmt: skip
    weights = {n: torch.zeros(shape) for n, shape in qwen3_moe.dense_tensors(s).items()}
    model = qwen3_moe.build(s, weights, TorchOps(), torch.float32)
    assert not weights and model.spec is s
