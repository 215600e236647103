"""Write a full-width Mixture-of-Experts checkpoint with random weights and *skewed* routing.

    python tools/make_synthetic.py /dev/shm/synthetic --layers 16
    python tools/make_synthetic.py /dev/shm/qwen --preset qwen3.6-35b-a3b --format nvfp4
    python tools/make_synthetic.py /dev/shm/oss --preset gpt-oss-120b

Real checkpoints cannot always be had where speed is measured. Random routers, however, spread
tokens evenly over the experts, which no trained model does, so an expert cache measured on them
looks far worse than it is. The layer shapes here are the published ones, and the routers have an
adjustable popularity skew:

- every token embedding shares one constant direction ``c`` (half of its energy);
- router row ``e`` holds ``skew * g_e`` along ``c`` (``g_e`` standard normal, drawn per layer) plus
  isotropic noise, so the logit of expert ``e`` is ``skew * g_e + N(0, 1)`` for a random token.

With ``--skew 1.0`` an LRU that holds 37 % of all experts misses about 15 % of its reads at decode,
as published for a trained 35B model; ``--skew 0`` is uniform routing. Sample with temperature 1:
greedy decoding of random weights falls into loops and flatters any cache.

``--format`` stores the experts, and what else is published so, in another format than the first
that the family has. ``--hollow 31`` leaves the experts out of the files: see ``tools/hollow.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from hollow import EXPERTS, holes, is_expert, runs, write_holes
from synthetic_families import PRESETS, Family, Tensors
from synthetic_formats import DTYPES, FORMATS, Source

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Made:
    """What was written."""

    layers: int
    experts: int  # of a layer
    experts_per_token: int
    vocab: int
    format: str
    total_bytes: int


class _Ordered:
    """Bytes of a file in order, in long writes: other threads get Python's lock for so long."""

    BYTES, BUFFERS = 32 << 20, 512  # of one write

    def __init__(self, fd: int) -> None:
        self._fd, self._at, self._bytes = fd, 0, 0
        self._waiting: list[memoryview] = []

    def add(self, data: memoryview) -> None:
        self._waiting.append(data)
        self._bytes += len(data)
        if self._bytes >= self.BYTES or len(self._waiting) >= self.BUFFERS:
            self.write()

    def skip(self, nbytes: int) -> None:
        """Leave a hole."""
        self.write()
        self._at += nbytes

    def write(self) -> None:
        while self._waiting:
            done = os.pwritev(self._fd, self._waiting, self._at)
            self._at += done
            while self._waiting and done >= len(self._waiting[0]):
                done -= len(self._waiting.pop(0))
            if done:
                self._waiting[0] = self._waiting[0][done:]
        self._bytes = 0


def write_file(path: Path, tensors: Tensors, *, hollow: bool = False) -> int:
    """One safetensors file. Its random numbers depend on the names of its tensors alone.

    Args:
        hollow: leave holes where experts belong.
    Returns:
        Where the tensors begin.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype = DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    with path.open("wb") as file:
        os.truncate(file.fileno(), len(text) + end)
        ordered = _Ordered(file.fileno())
        ordered.add(memoryview(text))
        _write_tensors(ordered, tensors, hollow)
    return len(text)


def _write_tensors(ordered: _Ordered, tensors: Tensors, hollow: bool) -> None:
    rng = random.Random(zlib.crc32(" ".join(tensors).encode()))
    for name, tensor in tensors.items():
        if hollow and is_expert(name):
            ordered.skip(tensor.nbytes)
            continue
        for piece in tensor.pieces(rng):
            ordered.add(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    ordered.write()


def write_experts(path: Path, layer: Tensors) -> list[tuple[int, int]]:
    """The experts of a layer, without a header; their runs."""
    experts = {name: tensor for name, tensor in layer.items() if is_expert(name)}
    with path.open("wb") as file:
        _write_tensors(_Ordered(file.fileno()), experts, hollow=False)
    # one run for each in the layer: what stands between them there is not here
    found, at = [], 0
    for begin, end in runs({name: tensor.nbytes for name, tensor in layer.items()}):
        found.append((at, at + end - begin))
        at += end - begin
    return found


def write_tokenizer(out: Path, vocab_size: int) -> None:
    """Byte-level BPE without merges, padded with filler tokens so that every id decodes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    vocab |= {f"w{i}": i for i in range(len(vocab), vocab_size - 3)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 262144,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def family_of(
    preset: str,
    layers: int | None = None,
    skew: float = 1.0,
    seed: int = 0,
    fmt: str | None = None,
    experts: int | None = None,
) -> Family:
    """A model of that shape, of which nothing is drawn yet but single vectors."""
    kind, published = PRESETS[preset]
    c = {**published, "bos_token_id": published["vocab_size"] - 3}
    c["eos_token_id"] = published["vocab_size"] - 1
    if layers:
        c["num_hidden_layers"] = layers
    if experts:
        c["num_local_experts" if "num_local_experts" in c else "num_experts"] = experts
    fmt = fmt or kind.formats[0]
    if fmt not in kind.formats:
        raise SystemExit(f"{preset} is not published as {fmt}: {', '.join(kind.formats)}")
    return kind(c, Source(seed), skew, fmt)


def make(out: Path, preset: str = "qwen3-30b-a3b", *, hollow: int = 0, **shape: Any) -> Made:
    """Write the checkpoint into folder ``out``; generation_config.json comes last.

    Args:
        hollow: of so many experts the numbers are written, for all others to repeat.
        shape: see ``family_of``.
    """
    family = family_of(preset, **shape)
    out.mkdir(parents=True, exist_ok=True)
    # named in order and drawn here, then written at once: each file has a lock of its own
    files = family.ends() + [family.layer(layer) for layer in range(family.layers)]
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    hollow = min(hollow, family.experts)
    few = family_of(preset, **{**shape, "experts": hollow}).layer(0) if hollow else {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            tokenizer = pool.submit(write_tokenizer, out, family.vocab)
            experts = pool.submit(write_experts, out / EXPERTS, few) if hollow else None
            write = partial(write_file, hollow=bool(hollow))
            begins = list(pool.map(write, (out / name for name in names), files))
            tokenizer.result()
    finally:
        torch.set_num_threads(threads)
    if experts:
        of_files = {}
        for name, begin, tensors in zip(names, begins, files, strict=True):
            whole = runs({name: t.nbytes for name, t in tensors.items()}, begin)
            if whole:
                of_files[name] = holes(whole, experts.result(), hollow / family.experts)
        write_holes(out, of_files)
    total_bytes = sum(t.nbytes for tensors in files for t in tensors.values())
    where = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "config.json").write_text(json.dumps(family.config(), indent=1))
    generation = {"do_sample": True, "temperature": 1.0, "eos_token_id": [family.vocab - 1]}
    (out / "generation_config.json").write_text(json.dumps(generation))
    return Made(
        family.layers, family.experts, family.top_k, family.vocab, family.format, total_bytes
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="fewer than published, to fit the disk")
    parser.add_argument("--experts", type=int, help="fewer than published, to try it out")
    parser.add_argument("--format", choices=FORMATS)
    parser.add_argument(
        "--hollow", type=int, default=0, metavar="N",
        help="write N experts alone, for tools/serve_hollow.py to repeat",
    )  # fmt: skip
    parser.add_argument("--skew", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args()
    began_s = time.perf_counter()
    shape = {"layers": o.layers, "skew": o.skew, "seed": o.seed, "fmt": o.format}
    made = make(o.out, o.preset, **shape, experts=o.experts, hollow=o.hollow)
    print(f"{o.out}: {asdict(made)} in {time.perf_counter() - began_s:.1f} s")


if __name__ == "__main__":
    main()
