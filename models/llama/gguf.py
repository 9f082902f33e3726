"""GGUF files of llama.cpp: a bounded reader of versions 2 and 3. `gguf_model.py` translates their contents to Hugging Face's.

    gguf = GgufFile.open(Path("model.gguf"))
    heads = gguf.metadata["llama.attention.head_count"]
    weights = gguf.read("blk.0.attn_q.weight")  # float32 [out, in], dequantised

A GGUF file is a header (counts, key-value pairs, one entry per tensor) followed by the tensors, each aligned. Every count,
length and offset is checked against the file's size before anything is allocated, so a damaged file is refused at once (the
reader of the `gguf` package hangs on some). Tensors are read by seek and read, not mapped, because a mapped file counts as
resident memory of its whole size.
"""

import math
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from jaxtyping import Float, UInt8

from lpes_jax.errors import UserError

# Value types: number -> numpy type. 8 is a string, 9 an array.
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
# Far above any real file (262,144 tokens with 580,604 merges; 1,200 tensors): limits for damaged files.
_MAX_ELEMENTS, _MAX_ENTRIES, _MAX_STRING_BYTES = 3 * 2**19, 2**16, 2**24
# Types that llama.cpp removed, and the type to use instead. Q4_2 and Q4_3 were removed in 2023. The others, layouts for one
# kind of CPU, were removed in 2024: llama.cpp now makes these layouts itself when it loads the plain type.
_REMOVED = {
    4: ("Q4_2", "Q4_0"), 5: ("Q4_3", "Q4_1"), 31: ("Q4_0_4_4", "Q4_0"), 32: ("Q4_0_4_8", "Q4_0"), 33: ("Q4_0_8_8", "Q4_0"),
    36: ("IQ4_NL_4_4", "IQ4_NL"), 37: ("IQ4_NL_4_8", "IQ4_NL"), 38: ("IQ4_NL_8_8", "IQ4_NL"),
}  # fmt: skip
_CHUNK_BYTES = 2**17  # unpacked at once; the temporaries are many times larger and should fit the CPU cache

ALL = slice(None)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's header entry: `shape` in row-major (torch) order, `offset` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """Byte offsets in the file: the end of the metadata, the end of the tensors' entries, and the start of the tensors."""

    metadata_end: int
    header_end: int
    data: int
    alignment: int


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file: `metadata` as plain Python values, and the tensors by their GGUF names."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    layout: Layout

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Read and check the header. Raises UserError that names the file and the wrong key or tensor."""
        try:
            with open(path, "rb") as file:
                return cls(path, *_Header(path, file).parse())
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error

    def read(self, name: str, rows: slice = ALL) -> Float[np.ndarray, "*shape"]:
        """Read one tensor, or some of its rows, in float32. Uses the memory of the result and a few MiB."""
        info = self.tensors[name]
        first, last, _ = rows.indices(info.shape[0])
        result = np.empty((last - first, *info.shape[1:]), np.float32)
        values, row_bytes = result.reshape(-1), info.nbytes // info.shape[0]
        block, block_bytes = GGML_QUANT_SIZES[info.type]
        step = max(1, _CHUNK_BYTES // block_bytes) * block
        try:
            with open(self.path, "rb") as file:
                file.seek(info.offset + first * row_bytes)
                for start in range(0, len(values), step):
                    chunk = values[start : start + step]
                    wanted = len(chunk) // block * block_bytes
                    data = file.read(wanted)
                    if len(data) < wanted:
                        raise UserError(f"{self.path}: tensor {name} ends early; the file has changed since it was opened")
                    # As one row of many blocks: the package loops over rows, which takes twice as long.
                    chunk[...] = dequantize(np.frombuffer(data, np.uint8)[None], info.type)[0]
        except OSError as error:
            raise UserError(f"{self.path}: tensor {name} cannot be read: {error.strerror or error}") from error
        return result

    def read_packed(self, name: str, rows: slice = ALL) -> UInt8[np.ndarray, "rows bytes"]:
        """Read the bytes of one tensor, or of some of its rows."""
        info = self.tensors[name]
        first, last, _ = rows.indices(info.shape[0])
        row_bytes = info.nbytes // info.shape[0]
        try:
            with open(self.path, "rb") as file:
                file.seek(info.offset + first * row_bytes)
                data = file.read((last - first) * row_bytes)
        except OSError as error:
            raise UserError(f"{self.path}: tensor {name} cannot be read: {error.strerror or error}") from error
        if len(data) < (last - first) * row_bytes:
            raise UserError(f"{self.path}: tensor {name} ends early; the file has changed since it was opened")
        return np.frombuffer(data, np.uint8).reshape(last - first, row_bytes)


class _Header:
    """A cursor over the header that tracks how many bytes are left."""

    def __init__(self, path: Path, file: BinaryIO):
        self.path, self.file, self.position = path, file, 0
        self.size = file.seek(0, 2)
        self.elements = 0
        file.seek(0)

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo], Layout]:
        if self.size == 0:
            raise UserError(f"{self.path}: the file is empty; fetch it again")
        if self.take(4, "the magic number") != b"GGUF":
            raise UserError(f"{self.path}: not a GGUF file (it does not begin with 'GGUF')")
        version = self.number("<I", "the version")
        if version not in (2, 3):
            big = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise UserError(
                f"{self.path}: GGUF version {version}{big} is not supported; supported: 2, 3; convert the model again"
            )
        num_tensors = self.count("the number of tensors", _MAX_ENTRIES, 8 + 1 + 4 + 8 + 4 + 8)
        num_pairs = self.count("the number of metadata keys", _MAX_ENTRIES, 8 + 1 + 4 + 1)

        metadata: dict[str, Any] = {}
        for index in range(num_pairs):
            key = self.string(f"metadata key {index}")
            if key in metadata:
                raise UserError(f"{self.path}: metadata key {key!r} is repeated; the file is damaged")
            metadata[key] = self.value(self.number("<I", f"the type of {key!r}"), f"{key!r}")
        if metadata.get("split.count", 0) not in (0, 1):
            raise UserError(f"{self.path}: one part of a split model; join the parts with `llama-gguf-split --merge`")

        metadata_end = self.position
        declared: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for index in range(num_tensors):
            name = self.string(f"the name of tensor {index}")
            if name in declared:
                raise UserError(f"{self.path}: tensor {name!r} is repeated; the file is damaged")
            num_dims = self.number("<I", f"the shape of tensor {name!r}")
            if not 1 <= num_dims <= 4:
                raise UserError(
                    f"{self.path}: tensor {name!r} has {num_dims} dimensions (1 to 4 are possible); the file is damaged"
                )
            shape = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims, f"the shape of tensor {name!r}"))
            kind, offset = struct.unpack("<IQ", self.take(12, f"the offset of tensor {name!r}"))
            declared[name] = shape[::-1], kind, offset

        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise UserError(f"{self.path}: general.alignment must be a power of two, got {alignment!r}")
        layout = Layout(metadata_end, self.position, align(self.position, alignment), alignment)
        return metadata, self.checked_tensors(declared, layout), layout

    def checked_tensors(self, declared: dict[str, tuple[tuple[int, ...], int, int]], layout: Layout) -> dict[str, TensorInfo]:
        """Check the tensors' offsets: aligned, inside the file, without overlaps, and nothing after the last tensor."""
        data, alignment = layout.data, layout.alignment
        tensors = {}
        for name, (shape, kind, offset) in declared.items():
            what = f"{self.path}: tensor {name!r}"
            if kind in _REMOVED:
                removed, instead = _REMOVED[kind]
                raise UserError(
                    f"{what} has type {removed} ({kind}), which llama.cpp removed; fetch the model's {instead} file instead"
                )
            if kind not in GGMLQuantizationType._value2member_map_:
                raise UserError(f"{what} has the unknown type {kind}; a newer `gguf` package may know it (pip install -U gguf)")
            kind = GGMLQuantizationType(kind)
            if not _can_dequantize(kind):
                raise UserError(f"{what} has type {kind.name}, which cannot be dequantised; use an F16, Q8_0 or Q4_K_M file")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            elements = math.prod(shape)
            if elements == 0 or shape[-1] % block:
                raise UserError(f"{what} has shape {list(shape)}, impossible for type {kind.name}; the file is damaged")
            if offset % alignment:
                raise UserError(f"{what} is at byte {offset}, not a multiple of {alignment}; the file is damaged")
            tensors[name] = TensorInfo(name, shape, kind, data + offset, elements // block * block_bytes)

        end = data
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise UserError(f"{self.path}: tensor {info.name!r} overlaps the one before it; the file is damaged")
            end = info.offset + info.nbytes
            if end > self.size:
                raise UserError(
                    f"{self.path}: tensor {info.name!r} ends at byte {end:,}, but the file has {self.size:,}; "
                    "it is truncated or damaged, fetch it again"
                )
        if self.size > align(end, alignment):
            raise UserError(
                f"{self.path}: {self.size - end:,} bytes too many after the last tensor; the file is damaged, fetch it again"
            )
        return tensors

    def take(self, length: int, what: str) -> bytes:
        if length > self.size - self.position:
            raise UserError(
                f"{self.path}: {what} needs {length:,} bytes at byte {self.position:,}, but the file has {self.size:,}; "
                "it is truncated or damaged, fetch it again"
            )
        self.position += length
        return self.file.read(length)

    def number(self, form: str, what: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def count(self, what: str, most: int, least_bytes: int) -> int:
        """Read a 64-bit count of things that take at least `least_bytes` each."""
        number = self.number("<Q", what)
        if number > most or number * least_bytes > self.size - self.position:
            raise UserError(
                f"{self.path}: {what} is {number:,}, impossible in a file of {self.size:,} bytes; it is damaged, fetch it again"
            )
        return number

    def string(self, what: str) -> str:
        length = self.count(f"the length of {what}", _MAX_STRING_BYTES, 1)
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: {what} is not valid UTF-8; the file is damaged, fetch it again") from error

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            return self.scalars(kind, 1, what)[0]
        kind = self.number("<I", f"the element type of {what}")
        least_bytes = 8 if kind == _STRING else 1
        count = self.count(f"the number of elements of {what}", _MAX_ELEMENTS - self.elements, least_bytes)
        self.elements += count
        if kind == _STRING:
            return [self.string(f"an element of {what}") for _ in range(count)]
        return self.scalars(kind, count, what)

    def scalars(self, kind: int, count: int, what: str) -> list[Any]:
        if kind not in _SCALARS:
            raise UserError(f"{self.path}: {what} has the unknown value type {kind}; the file is damaged or of a newer kind")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()


def align(position: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return -(-position // alignment) * alignment


@cache
def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    try:  # the package has no list of the types that it supports
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
