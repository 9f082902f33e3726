"""GGUF files written with the `gguf` package and read back, and damaged ones refused at once."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from lpes_jax.errors import UserError
from lpes_jax.models.llama.gguf import GgufFile
from lpes_jax.models.llama.gguf_model import hf_config

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


def test_every_type_of_value_and_an_alignment_of_one_are_read(tmp_path):
    kinds = {
        "UINT8": 200, "INT8": -100, "UINT16": 60_000, "INT16": -30_000, "UINT32": 4_000_000_000, "INT32": -2_000_000_000,
        "FLOAT32": 0.5, "BOOL": True, "UINT64": 2**63 + 1, "INT64": -(2**62), "FLOAT64": 0.1, "STRING": "é",
    }  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(1)
    for name, value in kinds.items():
        writer.add_key_value(f"own.{name}", value, gguf.GGUFValueType[name])
    writer.add_tensor("vector", WEIGHTS[0, :3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile.open(tmp_path / "m.gguf")
    assert {name: file.metadata[f"own.{name}"] for name in kinds} == kinds
    np.testing.assert_array_equal(file.read("vector"), WEIGHTS[0, :3])


def works(function, array: np.ndarray, kind: gguf.GGMLQuantizationType) -> bool:
    try:
        function(array, kind)
    except NotImplementedError:
        return False
    return True


KINDS = list(gguf.GGMLQuantizationType)
WIDE = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
DEQUANTIZED = [
    kind for kind in KINDS if works(gguf.quants.dequantize, np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
]
QUANTIZED = [kind for kind in DEQUANTIZED if works(gguf.quants.quantize, WIDE, kind)]
# The largest error on standard normal weights: half a step of the type's grid at the largest weight of a block.
ERRORS = {"F32": 0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 0.02, "Q5_0": 0.2, "Q5_1": 0.2, "Q4_0": 0.5, "Q4_1": 0.3, "MXFP4": 1.0}


def write_raw(path: Path, data: np.ndarray, kind: gguf.GGMLQuantizationType) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_quantised_tensors_are_what_the_package_dequantises(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("lpes_jax.models.llama.gguf._CHUNK_BYTES", 300)  # several chunks
    data = gguf.quants.quantize(WIDE, kind)
    read = GgufFile.open(write_raw(tmp_path / "m.gguf", data, kind)).read("t")
    np.testing.assert_array_equal(read, gguf.quants.dequantize(data, kind))
    assert read.shape == WIDE.shape and read.dtype == np.float32
    assert np.abs(read - WIDE).max() <= ERRORS.get(kind.name, 4.0)  # TQ: three values for all weights


@pytest.mark.parametrize("kind", [kind for kind in DEQUANTIZED if kind not in QUANTIZED], ids=lambda kind: kind.name)
def test_types_that_only_llama_cpp_writes_are_read(tmp_path, kind):
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # Bytes below 0x3c: as the high byte of a scale they are less than 1.
    data = np.random.default_rng(0).integers(0, 0x3C, (3, 512 // block * block_bytes), np.uint8)
    read = GgufFile.open(write_raw(tmp_path / "m.gguf", data, kind)).read("t")
    assert read.shape == (3, 512) and read.dtype == np.float32 and np.isfinite(read).all() and np.ptp(read) > 0
    np.testing.assert_array_equal(read, gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in DEQUANTIZED], ids=lambda kind: kind.name)
def test_types_that_cannot_be_dequantised_are_refused_by_name(tmp_path, kind):
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.zeros((3, 512 // block * block_bytes), np.uint8)
    with pytest.raises(UserError, match=f"m.gguf: tensor 't' has type {kind.name}.*Q4_K_M"):
        GgufFile.open(write_raw(tmp_path / "m.gguf", data, kind))


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
    offset = position(whole)
    path.write_bytes(whole[:offset] + struct.pack("<Q", value) + whole[offset + 8 :])
    began = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(UserError, match="m.gguf"):
        GgufFile.open(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20 and time.perf_counter() - began < 10


@pytest.mark.filterwarnings("ignore:.*freq_base")
def test_damage_anywhere_in_the_header_is_refused_or_harmless(tmp_path):
    whole = write(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "bad.gguf"
    refused = 0
    for position in range(0, header_size(tmp_path / "m.gguf") - 8, 3):
        for value in (2**60, 0):
            path.write_bytes(whole[:position] + struct.pack("<Q", value) + whole[position + 8 :])
            try:
                hf_config(GgufFile.open(path))
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
        (lambda data: data.replace(b"llama.rope.freq_base", b"llama.context_length"), "'llama.context_length' is repeated"),
        (lambda data: data.replace(b"tensor_b", b"tensor_a"), "'tensor_a' is repeated"),
        (lambda data: with_type_and_offset(data, b"tensor_a", kind=99), "'tensor_a' has the unknown type 99"),
        (lambda data: with_type_and_offset(data, b"tensor_a", kind=26), "'tensor_a' has type I32"),
        (lambda data: with_type_and_offset(data, b"tensor_a", kind=12), "impossible for type Q4_K"),
        (lambda data: with_type_and_offset(data, b"tensor_b", offset=2**60), "'tensor_b' ends at byte"),
        (lambda data: with_type_and_offset(data, b"tensor_b", offset=100), "'tensor_b' is at byte 100"),
        (lambda data: with_type_and_offset(data, b"tensor_b", offset=0), "overlaps"),
        (lambda data: data.replace("é".encode(), b"\xff\xff"), "not valid UTF-8"),
    ],
)
def test_damage_is_named(tmp_path, damage, named):
    path = write(tmp_path / "m.gguf", tensors={"tensor_a": WEIGHTS, "tensor_b": WEIGHTS})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=named) as error:
        GgufFile.open(path)
    assert "m.gguf" in str(error.value) and "\n" not in str(error.value)


def with_type_and_offset(data: bytes, name: bytes, *, kind: int = 0, offset: int = 0) -> bytes:
    """The file with another type and offset for a two-dimensional tensor."""
    start = data.index(name) + len(name) + 4 + 16
    return data[:start] + struct.pack("<IQ", kind, offset) + data[start + 12 :]


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
