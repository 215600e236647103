"""Broken checkpoints: each is refused from its headers, naming file, tensor, expected and found."""

from __future__ import annotations

import json
import os
import re

import pytest

from ftd.checkpoint.headers import check, read_checkpoint
from ftd.errors import CheckpointError, UnsupportedModel

FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.0.mlp.experts.2.up_proj.weight"


def read_and_check(maker):
    checkpoint = read_checkpoint(maker.path)
    return check(checkpoint, maker.architecture, maker.spec)


def refused(maker, *said: str, kind: type = CheckpointError) -> None:
    with pytest.raises(kind) as e:
        read_and_check(maker)
    for words in said:
        assert words in str(e.value), str(e.value)


def edit_json(file, edit) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def edit_header(file, edit) -> None:
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("dtype", "name"), [("BF16", "bf16"), ("F16", "f16"), ("F32", "f32")])
def test_a_good_checkpoint_gives_the_layout_of_its_experts(maker, shards, dtype, name):
    maker.dtype, maker.shards = dtype, shards
    maker.fill().write()
    layout = read_and_check(maker)
    assert (layout.format.name, layout.hidden, layout.inner) == (name, 32, 8)


def test_headers_agree_with_the_safetensors_library(maker):
    from safetensors import safe_open

    checkpoint = read_checkpoint(maker.write())
    assert checkpoint.config == maker.config
    assert checkpoint.generation_config == {}
    assert checkpoint.tensors.keys() == maker.tensors.keys()
    for info in checkpoint.tensors.values():
        with safe_open(info.file, "pt") as f:
            view = f.get_slice(info.name)
            assert (tuple(view.get_shape()), view.get_dtype()) == (info.shape, info.dtype)
        data = info.file.read_bytes()[info.begin : info.begin + info.nbytes]
        assert data == maker.tensors[info.name][2]


def test_stacked_and_fused_experts_are_understood(maker):
    maker.architecture.fused = True
    maker.fill().write()
    assert read_and_check(maker).inner == 8


def test_dense_tensors_may_have_another_dtype_than_the_experts(maker):
    _, shape, data = maker.tensors["model.layers.0.mlp.gate.weight"]
    maker.tensors["model.layers.0.mlp.gate.weight"] = ("F32", shape, data * 2)
    maker.write()
    assert read_and_check(maker).format.name == "bf16"


def test_missing_shard(maker):
    (maker.write() / SECOND).unlink()
    refused(maker, "1 of 3 shards", INDEX, SECOND, "download")


def test_shard_that_is_a_dangling_link(maker):
    (maker.write() / SECOND).unlink()
    (maker.path / SECOND).symlink_to("nowhere")
    refused(maker, "1 of 3 shards", SECOND)


def test_index_names_an_absent_tensor(maker):
    maker.write()
    edit_json(maker.path / INDEX, lambda c: c["weight_map"].update({"lm_head.weight": SECOND}))
    refused(maker, INDEX, "lm_head.weight", SECOND, "does not have it")


def test_tensor_in_no_index(maker):
    maker.write()
    edit_json(maker.path / INDEX, lambda c: c["weight_map"].pop(EXPERT))
    refused(maker, EXPERT, "which model.safetensors.index.json does not name there")


def test_tensor_in_two_shards(maker):
    maker.write()
    index = json.loads((maker.path / INDEX).read_text())["weight_map"]
    name = next(n for n, file in index.items() if file == SECOND)
    mine = [n for n, file in index.items() if file == FIRST]
    maker.write_file(FIRST, [*mine, name])
    refused(maker, name, FIRST, "does not name there")


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "", 3, None])
def test_index_names_something_that_is_no_file_name(maker, shard):
    maker.write()
    edit_json(maker.path / INDEX, lambda c: c["weight_map"].update({EXPERT: shard}))
    refused(maker, EXPERT, repr(shard), "not a file name")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_broken_index(maker, content):
    (maker.write() / INDEX).write_text(content)
    refused(maker, INDEX)


def test_missing_index(maker):
    (maker.write() / INDEX).unlink()
    refused(maker, INDEX, "is missing", "3 files", FIRST)


def test_missing_tensor(maker):
    del maker.tensors[EXPERT]
    maker.write()
    refused(maker, EXPERT, "[8, 32]", "is missing", "different models")


def test_wrong_shape(maker):
    dtype, _, data = maker.tensors[EXPERT]
    maker.tensors[EXPERT] = (dtype, (32, 8), data)
    maker.write()
    refused(maker, ".safetensors", EXPERT, "has shape [32, 8]", "[8, 32]")


def test_tensor_that_nobody_reads(maker):
    maker.tensors["mtp.0.weight"] = ("I32", (1,), bytes(4))
    maker.write()
    read_and_check(maker)  # the architecture ignores it
    maker.tensors["model.layers.0.self_attn.q_proj.bias"] = ("BF16", (2,), bytes(4))
    maker.write()
    refused(maker, "q_proj.bias has no place in a qwen3_moe model")


def test_mixed_dtypes_within_experts(maker):
    _, shape, data = maker.tensors[EXPERT]
    maker.tensors[EXPERT] = ("F32", shape, data * 2)
    maker.write()
    refused(maker, EXPERT, "is f32", "is bf16", "one format", kind=UnsupportedModel)


@pytest.mark.parametrize("cut", [1, 100])
def test_truncated_file(maker, cut):
    file = maker.write() / SECOND
    os.truncate(file, file.stat().st_size - cut)
    refused(maker, SECOND, "is cut off: tensor", f"the file has {file.stat().st_size} bytes")


def test_file_cut_within_its_header(maker):
    os.truncate(maker.write() / SECOND, 100)
    refused(maker, SECOND, "announce a header of", "at most 92 are possible")


def test_trailing_garbage(maker):
    file = maker.write() / SECOND
    file.write_bytes(file.read_bytes() + b"garbage")
    refused(maker, SECOND, "7 bytes belong to nothing")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 10_000_000])
def test_absurd_header_length(maker, length):
    file = maker.write() / SECOND
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    refused(maker, SECOND, f"announce a header of {length} bytes")


@pytest.mark.parametrize(("content", "said"), [(b"", "has 0 bytes"), (b"1234567", "has 7 bytes")])
def test_file_too_short_for_a_header(maker, content, said):
    (maker.write() / SECOND).write_bytes(content)
    refused(maker, SECOND, said)


def test_git_lfs_pointer(maker):
    (maker.write() / SECOND).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1")
    refused(maker, SECOND, "git-lfs pointer", "git lfs pull")


@pytest.mark.parametrize("text", [b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_header_that_is_no_json_object(maker, text):
    (maker.write() / SECOND).write_bytes(len(text).to_bytes(8, "little") + text)
    refused(maker, SECOND, "the header is not")


def test_header_with_a_name_twice(maker):
    entry = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = b"{" + entry + b"," + entry + b"}"
    (maker.write() / SECOND).write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    refused(maker, SECOND, "the header has a twice")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": [-1, 32]}, "impossible shape [-1, 32]"),
        ({"shape": [True, 32]}, "impossible shape"),
        ({"shape": "8"}, "impossible shape '8'"),
        ({"shape": [8, 33]}, "of shape [8, 33] and dtype BF16 needs 528 bytes"),
        ({"data_offsets": [5, 1]}, "impossible data_offsets [5, 1]"),
        ({"data_offsets": [0, 1.5]}, "impossible data_offsets [0, 1.5]"),
        ({"data_offsets": [0]}, "has no dtype, shape and data_offsets"),
        ({"dtype": "BF17"}, "unknown dtype 'BF17'"),
        ({"dtype": ["BF16"]}, "unknown dtype ['BF16']"),
    ],
)
def test_broken_entry_of_a_tensor(maker, change, said):
    maker.shards = 1
    file = maker.write() / "model.safetensors"
    edit_header(file, lambda header: header[EXPERT].update(change))
    refused(maker, "model.safetensors", EXPERT, said)


def test_data_with_a_gap_or_an_overlap(maker):
    maker.shards = 1
    file = maker.write() / "model.safetensors"

    def shift(header):
        begin, end = header[EXPERT]["data_offsets"]
        header[EXPERT]["data_offsets"] = [begin - 2, end - 2]

    edit_header(file, shift)
    refused(maker, "model.safetensors", "of the data, its header says")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_small_file(maker, name):
    (maker.write() / name).unlink()
    refused(maker, name, "is missing")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON: Expecting property name"),
        ("[]", "expected a JSON object, found list"),
        ("{}", "model_type is missing"),
        ('{"model_type": 3}', "model_type is missing"),
    ],
)
def test_broken_config(maker, content, said):
    (maker.write() / "config.json").write_text(content)
    refused(maker, "config.json", said)


def test_broken_generation_config(maker):
    (maker.write() / "generation_config.json").write_text("{")
    refused(maker, "generation_config.json", "not valid JSON")


def test_weights_in_other_formats(maker):
    maker.write()
    for file in maker.path.glob("model*"):
        file.unlink()
    refused(maker, "has no *.safetensors")
    (maker.path / "model-q4.gguf").write_bytes(b"GGUF")
    refused(maker, "no *.safetensors, but model-q4.gguf", kind=UnsupportedModel)


def test_a_pipe_in_place_of_a_file_does_not_block(maker):
    (maker.write() / SECOND).unlink()
    os.mkfifo(maker.path / SECOND)
    refused(maker, SECOND, "not a regular file")


def test_other_files_of_weights_are_left_alone(maker):
    maker.shards = 1
    maker.write()
    (maker.path / "consolidated.safetensors").write_bytes(b"junk")
    assert read_and_check(maker).inner == 8


def test_messages_name_whole_paths(maker):
    (maker.write() / SECOND).write_bytes(b"")
    with pytest.raises(CheckpointError, match=re.escape(str(maker.path / SECOND))):
        read_checkpoint(maker.path)
