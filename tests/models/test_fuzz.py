"""Damaged model files: bytes flipped, cut, overwritten and inserted in the files' headers.

Every one of them is refused as the user's mistake, in one line, at once and without a large allocation; or it is loaded, and
then fits together. The normal run tries 200; `pytest -m fuzz` tries 3,000 more, others each time.
"""

import json
import re
import struct
import time
import tracemalloc
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers.pre_tokenizers import ByteLevel

from lpes_jax.errors import UserError
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint, save_llama
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.gguf import GgufFile
from lpes_jax.models.llama.gguf_model import TENSOR_NAMES
from lpes_jax.models.llama.model import Llama
from lpes_jax.models.llama.tokenizer import load_tokenizer, stop_ids
from lpes_jax.rope import inverse_frequencies

SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = {
    "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": 32,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CONFIGS = {
    "llama": {"model_type": "llama", "rope_theta": 1e4, "rope_scaling": LLAMA3, "tie_word_embeddings": False},
    "mistral": {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": 16},
    "qwen2": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "smollm3": {"model_type": "smollm3", "rope_theta": 5e6, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
    "phi3": {"model_type": "phi3", "rope_theta": 1e4, "rope_scaling": LONGROPE, "sliding_window": 16},
}  # fmt: skip
Damage = Callable[[bytes], bytes]


def write_gguf(path: Path, architecture: str, tensors: dict[str, np.ndarray], tokenizer: str) -> None:
    """The weights of a folder, and a tokenizer; half of the matrices in quantised form."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_tokenizer_model(tokenizer)
    alphabet = sorted(ByteLevel.alphabet()) if tokenizer == "gpt2" else [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = (
        ["<unk>", "<s>", "</s>", *alphabet, "▁", "h", "e", "he"] if tokenizer == "llama" else [*alphabet, "he", "<s>", "</s>"]
    )
    writer.add_token_list(tokens)
    if tokenizer == "gpt2":
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_merges(["h e"])
        writer.add_token_types([1] * 257 + [3, 3])
    else:
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 4)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for index, (hf, name) in enumerate(TENSOR_NAMES.items()):
        for layer in range(2) if "{}" in hf else [0]:
            if (array := tensors.get(hf.format(layer))) is None:
                continue
            if array.ndim == 2 and index % 2:
                kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(name.format(layer), gguf.quants.quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name.format(layer), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def good_files(tmp_path_factory) -> dict[str, tuple[Path, bytes, int]]:
    """name -> the file to damage, its contents, and how many of its bytes describe it."""
    folder = tmp_path_factory.mktemp("fuzz")
    files = {}
    for name, config in CONFIGS.items():
        model = Llama(LlamaConfig.from_hf(SIZES | config), rngs=nnx.Rngs(0), dtype=jnp.dtype("float32"))
        save_llama(model, folder / name)
        (folder / name / "config.json").write_text(json.dumps(SIZES | config, indent=1))
        files[f"{name} config.json"] = folder / name / "config.json"
    files["safetensors"] = files["safetensors, its length kept right"] = folder / "llama" / "model.safetensors"
    for architecture, tokenizer in (("llama", "llama"), ("qwen2", "gpt2")):
        config = CONFIGS[architecture] | SIZES | {"hidden_size": 32, "intermediate_size": 32}
        model = Llama(LlamaConfig.from_hf(config), rngs=nnx.Rngs(0), dtype=jnp.dtype("float32"))
        save_llama(model, folder / f"for {architecture}.gguf")
        path = files[f"{architecture} gguf"] = folder / f"{architecture}.gguf"
        write_gguf(path, architecture, load_file(folder / f"for {architecture}.gguf" / "model.safetensors"), tokenizer)
    for path in set(files.values()):
        load(path)
    contents = {name: path.read_bytes() for name, path in files.items()}
    return {name: (path, contents[name], described(path, contents[name])) for name, path in files.items()}


def described(path: Path, content: bytes) -> int:
    if path.suffix == ".json":
        return len(content)
    if path.suffix == ".safetensors":
        return 8 + struct.unpack("<Q", content[:8])[0]
    return min(info.offset for info in GgufFile.open(path).tensors.values())


def load(path: Path) -> None:
    """Load everything that the file is part of; the loaded parts must fit together."""
    path = path if path.suffix == ".gguf" else path.parent
    model = load_llama(open_checkpoint(path), "float32")
    config = model.config
    assert model.embed.shape == (config.vocab_size, config.hidden_size)
    assert model.layers.attention_norm.shape == (config.num_layers, config.hidden_size)
    frequencies = np.asarray(inverse_frequencies(config.rope, config.head_dim))
    assert np.isfinite(frequencies).all() and (frequencies >= 0).all()
    if path.suffix == ".gguf":
        tokenizer = load_tokenizer(path)
        tokenizer.decode(tokenizer.encode("hehe é\n"))
        stop_ids(path, tokenizer)


BYTES = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.sampled_from([2**64 - 1, 2**63, 2**60, 2**40, 2**31, 2**31 - 1, 2**20, 0, 1]).map(lambda n: struct.pack("<Q", n)),
    st.sampled_from(
        [b"0", b"9" * 5, b"9" * 20, b"-", b".", b"e99", b"null", b"true", b"[", b"{", b'"', b",", b"NaN", b"\xff", b"\\u"]
    ),
)


def edits(size: int) -> st.SearchStrategy[Damage]:
    """One change somewhere in the first `size` bytes."""
    position = st.integers(0, size - 1)

    def flip(position: int, bit: int) -> Damage:
        return lambda data: (
            data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :] if position < len(data) else data
        )

    def cut(position: int, length: int) -> Damage:
        return lambda data: data[:position] + data[position + length :]

    def insert(position: int, new: bytes) -> Damage:
        return lambda data: data[:position] + new + data[position:]

    def overwrite(position: int, new: bytes) -> Damage:
        return lambda data: data[:position] + new + data[position + len(new) :]

    return st.one_of(
        st.builds(flip, position, st.integers(0, 7)),
        st.builds(cut, position, st.one_of(st.integers(1, 16), st.just(2**40))),
        st.builds(insert, position, BYTES),
        st.builds(overwrite, position, BYTES),
    )


def numbers(content: bytes) -> st.SearchStrategy[Damage]:
    """Another value for one of the numbers of a JSON file."""
    spans = [match.span() for match in re.finditer(rb"(?<=[ :\[])[\d.]+", content)]
    values = [
        b"0",
        b"1",
        b"-1",
        b"3",
        b"2.5",
        b"1e400",
        b"NaN",
        b"2147483647",
        b"99999999999999999999",
        b"true",
        b"null",
        b'"7"',
        b"[1]",
        b"{}",
    ]
    return st.builds(
        lambda span, value: lambda data: data[: span[0]] + value + data[span[1] :],
        st.sampled_from(spans),
        st.sampled_from(values),
    )


def try_one(good_files: dict[str, tuple[Path, bytes, int]], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(good_files)))
    path, content, size = good_files[name]
    changes = st.lists(edits(size), min_size=1, max_size=3)
    if path.suffix == ".json":
        changes = st.one_of(changes, st.lists(numbers(content), min_size=1, max_size=1))
    damaged = content
    for change in data.draw(changes):
        damaged = change(damaged)
    if name.endswith("kept right"):
        header = len(damaged) - (len(content) - size) - 8
        damaged = struct.pack("<Q", max(header, 0)) + damaged[8:]
    path.write_bytes(damaged)
    total = sum(file.stat().st_size for file in ([path] if path.suffix == ".gguf" else path.parent.iterdir()))
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a RoPE base that is missing is told, and taken to be 10000
            load(path)
    except UserError as error:
        assert "\n" not in str(error)
        assert tracemalloc.get_traced_memory()[1] < 2 * total + 2**26
    finally:
        tracemalloc.stop()
        path.write_bytes(content)
    assert time.perf_counter() - began < 5


checked = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


@settings(max_examples=40, derandomize=True, database=None, deadline=timedelta(seconds=5), suppress_health_check=checked)
@given(data=st.data())
def test_damaged_files_are_refused_or_loaded_right(good_files, data):
    try_one(good_files, data)


@pytest.mark.fuzz
@settings(max_examples=3000, database=None, deadline=timedelta(seconds=5), suppress_health_check=checked, print_blob=True)
@given(data=st.data())
def test_many_damaged_files_are_refused_or_loaded_right(good_files, data):
    try_one(good_files, data)
