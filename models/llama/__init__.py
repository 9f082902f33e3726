"""Llama-family models in Flax: from a zoo name, a Hugging Face folder, a .gguf file or a hub id to a model and its tokenizer.

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

from lpes_jax.errors import UserError
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama

if TYPE_CHECKING:
    import transformers
    from jax.sharding import Mesh

__all__ = ["Llama", "LlamaConfig", "Loaded", "load", "load_model", "load_tokenizer"]


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer, the ids that end a text, and how records name it: name, num_layers, sha256, dtype.

    sha256 is that of the weight files; `mark` stands there too where the files hold factors (`lpes_jax.mark`).
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
) -> Loaded:
    """All that a verb needs of a model, as `load_model` and `load_tokenizer` give it.

    revision: of a hub model. tokenizer: one in the place of the model's own, named as models are (a hub id's at `revision`
    too); texts then end where it or the model's files say.
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
    sha256 = _beside(checkpoint.sha256)  # ten seconds and more for 13 GB
    chosen = _tokenizer(path, other)
    model = load_llama(checkpoint, dtype, mesh)
    identity = {
        "name": name_or_path,
        "num_layers": checkpoint.config.num_layers,
        "sha256": sha256.result(),
        "dtype": dtype,
    }
    if checkpoint.config.mark is not None:
        identity["mark"] = checkpoint.config.mark.record
    return Loaded(model, chosen, identity, chosen.stop_ids)


def _beside(function: Callable[[], str]) -> "Future[str]":
    """What a function will give, which runs in a thread that no exit waits for: a refused model is refused at once."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def load_model(name_or_path: str, dtype: str = "auto", mesh: "Mesh | None" = None) -> Llama:
    """The model, with its weights in `dtype`, on the default device or a mesh (lpes_jax.mesh).

    dtype: bfloat16, float16, float32, or as the verbs' auto: bfloat16 on a GPU, float32 on a CPU. Raises UserError for another
    dtype, where there is no such model, and where it cannot be split over the mesh.
    """
    # Imported here, like the tokenizer's: what only builds a `Llama` needs none of the readers.
    from lpes_jax.models.llama.checkpoint import checked_dtype, load_llama, open_checkpoint
    from lpes_jax.models.zoo import resolve

    dtype = checked_dtype(dtype).name
    return load_llama(open_checkpoint(resolve(name_or_path)), dtype, mesh)


def load_tokenizer(name_or_path: str) -> "transformers.PreTrainedTokenizerFast":
    """The tokenizer that belongs to the model. Its `stop_ids` are what ends a text, by all of the model's files.

    Raises UserError where the model has no tokenizer, or one that is not understood.
    """
    from lpes_jax.models.zoo import resolve

    return _tokenizer(resolve(name_or_path))


def _tokenizer(path: Path, other: "Path | transformers.PreTrainedTokenizerFast | None" = None) -> Any:
    """The tokenizer of the model at `path`, or another in its place."""
    from lpes_jax.models.llama.tokenizer import load_tokenizer, stop_ids

    tokenizer: Any = other
    if other is None or isinstance(other, Path):
        tokenizer = load_tokenizer(path if other is None else other)
    tokenizer.stop_ids = stop_ids(path, tokenizer)
    return tokenizer
