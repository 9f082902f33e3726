"""Llama-family models in Flax: load a model and its tokenizer by zoo name, Hugging Face folder, .gguf file or hub id.

    model = load_model("smollm2-135m-instruct")
    tokenizer = load_tokenizer("smollm2-135m-instruct")

`checkpoint.py` reads and writes the weights, `gguf.py` reads llama.cpp's files, `model.py` is the model.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_jax.choices import WeightFormat
from lpes_jax.errors import UserError
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama

if TYPE_CHECKING:
    import transformers
    from jax.sharding import Mesh

__all__ = ["Llama", "LlamaConfig", "Loaded", "load", "load_model", "load_tokenizer"]


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer, the ids that end a text, and its identity in records: name, num_layers, sha256, dtype.

    sha256 is the hash of the weight files. If the files already hold factors, `identity` has a `mark` too (`lpes_jax.mark`),
    and the `weight_format` if it is not full.
    """

    model: Llama
    tokenizer: "transformers.PreTrainedTokenizerFast"
    identity: dict[str, Any]
    stop_ids: list[int]


def load(
    name_or_path: str,
    dtype: str = "auto",
    mesh: "Mesh | None" = None,
    *,
    revision: str | None = None,
    tokenizer: "str | transformers.PreTrainedTokenizerFast | None" = None,
    weight_format: WeightFormat = "full",
) -> Loaded:
    """Load everything that a verb needs of a model, as `load_model` and `load_tokenizer`.

    Args:
        name_or_path: A zoo name, folder, .gguf file or hub id.
        dtype: See `load_model`.
        mesh: See `load_model`.
        revision: The revision of a hub model.
        tokenizer: Replaces the model's own tokenizer; named like a model (a hub id uses `revision` too). Texts then end at the
            stop ids of this tokenizer and of the model's files.
        weight_format: See `load_model`.
    """
    from lpes_jax.models.llama.checkpoint import checked_dtype, load_llama, open_checkpoint
    from lpes_jax.models.zoo import resolve

    dtype = checked_dtype(dtype).name
    path = resolve(name_or_path, revision)
    try:
        other = resolve(tokenizer, revision, weights=False) if isinstance(tokenizer, str) else tokenizer
    except UserError as error:
        raise UserError(f"tokenizer {tokenizer!r:.60}: {error}") from error
    checkpoint = open_checkpoint(path)
    sha256 = _in_thread(checkpoint.sha256)  # ten seconds and more for 13 GB
    tokenizing = _in_thread(lambda: _tokenizer(path, other))  # beside the weights; what it refuses ends their loading
    model = load_llama(checkpoint, dtype, mesh, weight_format, between=lambda: tokenizing.done() and tokenizing.result())
    chosen = tokenizing.result()
    identity = {
        "name": name_or_path,
        "num_layers": checkpoint.config.num_layers,
        "sha256": sha256.result(),
        "dtype": dtype,
    }
    if weight_format != "full":
        identity["weight_format"] = weight_format
    if checkpoint.config.mark is not None:
        identity["mark"] = checkpoint.config.mark.record
    return Loaded(model, chosen, identity, chosen.stop_ids)


def _in_thread(function: Callable[[], Any]) -> "Future[Any]":
    """Run a function in a daemon thread, which does not delay an exit, so that a bad model is refused at once."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def load_model(
    name_or_path: str, dtype: str = "auto", mesh: "Mesh | None" = None, *, weight_format: WeightFormat = "full"
) -> Llama:
    """Load a model, with its weights in `dtype`, on the default device or a mesh (lpes_jax.mesh).

    Args:
        name_or_path: A zoo name, folder, .gguf file or hub id.
        dtype: bfloat16, float16, float32, or auto (bfloat16 on a GPU, float32 on a CPU).
        mesh: The devices; None means the default device.
        weight_format: How the layers' matrices are stored: full (in `dtype`), packed (as in a quantised .gguf file, unpacked
            while a layer runs), or int8 (like packed, and other matrices are rounded to 8 bits).

    Raises:
        UserError: The dtype is not supported, there is no such model, the mesh cannot split it, or packed weights are asked for
            and the file has none.
    """
    # Imported here, as for the tokenizer: code that only builds a `Llama` needs none of the readers.
    from lpes_jax.models.llama.checkpoint import checked_dtype, load_llama, open_checkpoint
    from lpes_jax.models.zoo import resolve

    dtype = checked_dtype(dtype).name
    return load_llama(open_checkpoint(resolve(name_or_path)), dtype, mesh, weight_format)


def load_tokenizer(name_or_path: str) -> "transformers.PreTrainedTokenizerFast":
    """Load the tokenizer of a model. Its `stop_ids` are the ids that end a text, from all of the model's files.

    Raises UserError if the model has no tokenizer, or none that is supported.
    """
    from lpes_jax.models.zoo import resolve

    return _tokenizer(resolve(name_or_path))


def _tokenizer(path: Path, other: "Path | transformers.PreTrainedTokenizerFast | None" = None) -> Any:
    """The tokenizer of the model at `path`, or `other` in its place."""
    from lpes_jax.models.llama.tokenizer import load_tokenizer, stop_ids

    tokenizer: Any = other
    if other is None or isinstance(other, Path):
        tokenizer = load_tokenizer(path if other is None else other)
    tokenizer.stop_ids = stop_ids(path, tokenizer)
    return tokenizer
