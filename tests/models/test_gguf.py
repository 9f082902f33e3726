"""GGUF files written with the `gguf` package and read back, and damaged ones refused at once."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from lpes_jax.errors import UserError
from lpes_jax.models.llama.gguf import GgufFile, llama_config, unpermute

WEIGHTS = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)


def write(path: Path, *, architecture: str = "llama", tensors: dict[str, np.ndarray] | None = None, **metadata) -> Path:
    """A GGUF file whose header describes a small Llama; `metadata` (without `llama.`, `__` for dots) replaces its keys."""
    keys = {
        "block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 64, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5e5,
    }  # fmt: skip
    keys |= {key.replace("__", "."): value for key, value in metadata.items()}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if value is None:
            continue
        kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kind.get(type(value), writer.add_array)(f"llama.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", "🙂"])
    for name, array in ({"token_embd.weight": WEIGHTS} if tensors is None else tensors).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def header_size(path: Path) -> int:
    return min(info.offset for info in GgufFile.open(path).tensors.values())


def test_plain_tensors_come_back_bit_for_bit(tmp_path):
    tensors = {"token_embd.weight": WEIGHTS, "half": WEIGHTS.astype(np.float16), "vector": WEIGHTS[0]}
    file = GgufFile.open(write(tmp_path / "m.gguf", tensors=tensors))
    assert file.tensors["half"].shape == (24, 64) and file.tensors["half"].type.name == "F16"
    for name, wanted in tensors.items():
        read = file.read(name)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, wanted.astype(np.float32))
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "é", "🙂"]
    assert file.metadata["general.architecture"] == "llama"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "BF16"])
def test_quantised_tensors_are_what_the_package_dequantises(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("lpes_jax.models.llama.gguf._CHUNK_BYTES", 200)  # several chunks
    kind = gguf.GGMLQuantizationType[kind]
    data = gguf.quants.quantize(WEIGHTS, kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GgufFile.open(tmp_path / "m.gguf").read("t")
    np.testing.assert_array_equal(read, gguf.quants.dequantize(data, kind))
    assert 0 < np.abs(read - WEIGHTS).max() < 0.3


def test_query_rows_go_from_metas_order_to_hugging_faces():
    rows = np.repeat(np.arange(16, dtype=np.float32)[:, None], 3, axis=1)
    assert unpermute(rows[:8], 1)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def test_config_from_the_metadata(tmp_path):
    config = llama_config(GgufFile.open(write(tmp_path / "m.gguf")))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (32, 64, 24)
    assert config.rms_norm_eps == 1e-5  # not its float32 neighbour 9.999999747378752e-06
    assert config.rope.rope_theta == 500000.0 and config.rope.rope_type == "default"
    assert config.tie_word_embeddings
    tensors = {"token_embd.weight": WEIGHTS, "output.weight": WEIGHTS}
    path = write(tmp_path / "m.gguf", tensors=tensors, attention__key_length=16, attention__head_count_kv=None)
    config = llama_config(GgufFile.open(path))
    assert (config.head_dim, config.num_kv_heads, config.tie_word_embeddings) == (16, 4, False)


@pytest.mark.parametrize("keys", [{"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {"rope__scale_linear": 4.0}])
def test_linear_rope(tmp_path, keys):
    rope = llama_config(GgufFile.open(write(tmp_path / "m.gguf", **keys))).rope
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)


def test_a_missing_rope_base_is_told(tmp_path):
    file = GgufFile.open(write(tmp_path / "m.gguf", rope__freq_base=None))
    with pytest.warns(UserWarning, match="llama.rope.freq_base"):
        assert llama_config(file).rope.rope_theta == 10000.0


@pytest.mark.parametrize(
    "keys, named",
    [
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "'yarn'"),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": -1.0}, "llama.rope.scaling.factor"),
        ({"rope__dimension_count": 4}, "llama.rope.dimension_count"),
        ({"expert_count": 8}, "llama.expert_count"),
        ({"attention__sliding_window": 4096}, "llama.attention.sliding_window"),
        ({"attention__head_count_kv": [2, 4]}, "llama.attention.head_count_kv"),
        ({"block_count": None}, "llama.block_count"),
        ({"attention__head_count": "four"}, "llama.attention.head_count"),
        ({"attention__head_count": 0}, "head"),
        ({"architecture": "qwen2"}, "'qwen2'.*supported: llama"),
        ({"tensors": {"token_embd.weight": WEIGHTS, "rope_freqs.weight": WEIGHTS[0]}}, "rope_freqs.weight"),
        ({"tensors": {"output.weight": WEIGHTS}}, "token_embd.weight"),
    ],
)
def test_models_that_are_not_implemented_are_refused_by_name(tmp_path, keys, named):
    with pytest.raises(UserError, match=named) as error:
        llama_config(GgufFile.open(write(tmp_path / "m.gguf", **keys)))
    assert "m.gguf" in str(error.value) or named == "head"


def test_every_truncation_is_refused(tmp_path):
    whole = write(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "short.gguf"
    for length in [*range(header_size(tmp_path / "m.gguf") + 1), len(whole) - 33, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="short.gguf"):
            GgufFile.open(path)


def test_more_bytes_than_the_header_declares_are_refused(tmp_path):
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes() + bytes(32))
    with pytest.raises(UserError, match="32 bytes too many"):
        GgufFile.open(path)


def test_a_file_that_shrinks_after_opening_is_refused(tmp_path):
    path = write(tmp_path / "m.gguf")
    file = GgufFile.open(path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(UserError, match="token_embd.weight"):
        file.read("token_embd.weight")


@pytest.mark.parametrize(
    "position",
    [
        lambda data: 8,  # number of tensors
        lambda data: 16,  # number of keys
        lambda data: 24,  # length of the first key
        lambda data: data.index(b"llama.block_count") - 8,
        lambda data: data.index(b"tokenizer.ggml.tokens") + 21 + 4 + 4,  # number of strings in an array
        lambda data: data.index(b"tokenizer.ggml.tokens") + 21 + 4 + 4 + 8,  # length of the first of them
        lambda data: data.index(b"token_embd.weight") - 8,
        lambda data: data.index(b"token_embd.weight") + 17 + 4,  # a dimension
    ],
)
@pytest.mark.parametrize("value", [2**60, 2**64 - 1, 2**31])
def test_absurd_counts_are_refused_at_once_and_without_allocation(tmp_path, position, value):
    path = write(tmp_path / "m.gguf")
    whole = path.read_bytes()
    at = position(whole)
    path.write_bytes(whole[:at] + struct.pack("<Q", value) + whole[at + 8 :])
    began = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(UserError, match="m.gguf"):
        GgufFile.open(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20 and time.perf_counter() - began < 1


@pytest.mark.filterwarnings("ignore:.*freq_base")
def test_damage_anywhere_in_the_header_is_refused_or_harmless(tmp_path):
    whole = write(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "bad.gguf"
    refused = 0
    for position in range(0, header_size(tmp_path / "m.gguf") - 8, 3):
        for value in (2**60, 0):
            path.write_bytes(whole[:position] + struct.pack("<Q", value) + whole[position + 8 :])
            try:
                llama_config(GgufFile.open(path))
            except UserError:
                refused += 1
    assert refused > 250


@pytest.mark.parametrize(
    "damage, named",
    [
        (lambda data: b"", "empty"),
        (lambda data: b"PK\3\4" + data[4:], "not a GGUF file"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version 1"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian"),
        (lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:], "number of tensors"),
        (lambda data: data[:16] + struct.pack("<Q", 2**60) + data[24:], "number of metadata keys"),
        (lambda data: data.replace(b"llama.rope.freq_base", b"llama.context_length"), "'llama.context_length' stands twice"),
        (lambda data: data.replace(b"tensor_b", b"tensor_a"), "'tensor_a' stands twice"),
        (lambda data: place(data, b"tensor_a", kind=99), "'tensor_a' has the unknown type 99"),
        (lambda data: place(data, b"tensor_a", kind=26), "'tensor_a' has type I32"),
        (lambda data: place(data, b"tensor_a", kind=12), "impossible for type Q4_K"),
        (lambda data: place(data, b"tensor_b", offset=2**60), "'tensor_b' ends at byte"),
        (lambda data: place(data, b"tensor_b", offset=100), "'tensor_b' lies at 100"),
        (lambda data: place(data, b"tensor_b", offset=0), "overlaps"),
        (lambda data: data.replace("é".encode(), b"\xff\xff"), "not valid UTF-8"),
    ],
)
def test_damage_is_named(tmp_path, damage, named):
    path = write(tmp_path / "m.gguf", tensors={"tensor_a": WEIGHTS, "tensor_b": WEIGHTS})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=named) as error:
        GgufFile.open(path)
    assert "m.gguf" in str(error.value) and "\n" not in str(error.value)


def place(data: bytes, name: bytes, *, kind: int = 0, offset: int = 0) -> bytes:
    """The file with another type and offset for a two-dimensional tensor."""
    at = data.index(name) + len(name) + 4 + 16
    return data[:at] + struct.pack("<IQ", kind, offset) + data[at + 12 :]


def test_part_of_a_split_model_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("t", WEIGHTS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="llama-gguf-split --merge"):
        GgufFile.open(tmp_path / "m.gguf")


def test_no_such_file(tmp_path):
    with pytest.raises(UserError, match="m.gguf"):
        GgufFile.open(tmp_path / "m.gguf")
