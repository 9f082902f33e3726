"""The hash of a model's weight files, which identifies the model in records.

It takes seconds per 10 GB on one core. A command begins it before it imports JAX (`begin`), and needs it after the weights are
loaded. This module imports no JAX.
"""

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from lpes_jax.errors import UserError
from lpes_jax.json_files import read_json

_CHUNK = 2**22
_Content = tuple[tuple[str, int, int, int], ...]  # of each file: path, inode, size, time of its last change
_begun: dict[_Content, "Future[str]"] = {}


def begin(model: str) -> None:
    """Begin to hash the weights of a model folder or .gguf file, in a daemon thread; nothing for any other name.

    What is wrong with the files is reported when they are loaded.
    """
    try:
        files = _weight_files(Path(model).expanduser()) if model else []
        content = _content(files)
    except (OSError, RuntimeError, TypeError, ValueError, UserError):
        return
    if not files or content in _begun:
        return
    future = _begun[content] = Future()

    def run() -> None:
        try:
            future.set_result(_hashed(files))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()


def sha256_of(files: Sequence[Path]) -> str:
    """The sha256 of the concatenated files, from `begin` if it hashed these files and they have not changed since."""
    future = _begun.pop(_content(files), None)
    return _hashed(files) if future is None else future.result()


def _hashed(files: Sequence[Path]) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    return digest.hexdigest()


def _weight_files(path: Path) -> list[Path]:
    """The files of `Checkpoint.weight_files`, as far as names tell."""
    if path.is_file():
        return [path] if path.suffix == ".gguf" else []
    weights, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if weights.is_file():
        return [weights]
    weight_map = read_json(index, dict, finite=False).get("weight_map")
    shards = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    return [path / shard for shard in sorted(shards) if Path(shard).name == shard]


def _content(files: Sequence[Path]) -> _Content:
    stats = [(path, path.stat()) for path in files]
    return tuple((str(path.absolute()), stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats)
