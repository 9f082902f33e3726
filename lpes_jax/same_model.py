"""Check that factors are used with the model that they were found for.

    found = LayerFactors(values, model=identity | facts(config, tokenizer), rope=config.rope.to_hf())
    record = check_model(found, config, tokenizer=tokenizer, sha256=identity["sha256"])  # UserError for another model's factors

A factors.json records its model's sizes, its RoPE, a hash of its tokenizer, and the sha256 of its weight files. If the sizes,
the RoPE or the tokenizer differ, it is another model: refused, unless the user allows it (`--other-model`, in Python
`other_model=True`). If only the weights differ, it may be another quantisation or format of the same model: a warning. Entries
that a file lacks are not checked; files of the first release have RoPE, layers and sha256 only.

Formats describe the same model in different ways, and these must count as equal. A Hugging Face folder has the rule of Llama
3's RoPE, a GGUF file the divisors that follow from it, so frequencies are compared rather than names. Of tokenizers, the ids of
a text and the first pieces of the vocabulary are compared, not the description of the pipeline.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from lpes_jax import hosts
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.mark import refuse_marked
from lpes_jax.models.llama import Loaded
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.rope import RopeParameters, inverse_frequencies

_SIZES = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "rotary_dim", "hidden_size", "vocab_size")
_CLOSE = 2e-5  # GGUF files have float32 numbers, config.json has decimals
_PIECES = 4096  # only the first of a vocabulary, because its padding differs by format
_TEXT = (  # begins with a letter: some formats of a model put a space before a text that begins with none
    "The value of key-0f3c is 8417 (3.14159, 2,048 tokens, $1.5e-10) and don't ask why:\n\n  def f(x):\n\treturn x ** 2  # ok\n"
    'A UUID "2a8d601d-1d69-4e64-9f90-8ad825a74195"; Ça, naïve, Zürich, cafe\u0301, Ångström; Привет, мир! 東京で 漢字 🙂👍🏽'
)


def facts(config: LlamaConfig, tokenizer: Any = None) -> dict[str, Any]:
    """The entries of a factors.json about its model, in addition to name and sha256, as JSON for its key `model`."""
    found: dict[str, Any] = {name: getattr(config, name) for name in _SIZES}
    if config.rope.original_max_position_embeddings:
        found["rope_window"] = config.rope.original_max_position_embeddings  # the RoPE entry of `dynamic` lacks it
    if tokenizer is not None:
        found["tokenizer_sha256"] = tokenizer_sha256(tokenizer)
    return found


def tokenizer_sha256(tokenizer: Any) -> str:
    """A hash of the ids of a text and the first pieces of the vocabulary, equal for all formats of one tokenizer."""
    pieces = tokenizer.convert_ids_to_tokens(range(min(len(tokenizer), _PIECES)))
    pieces = [(index, piece) for index, piece in enumerate(pieces) if piece is not None and not piece.startswith("[PAD")]
    ids = tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    return hashlib.sha256(json.dumps([ids, pieces]).encode()).hexdigest()


def check_model(
    factors: LayerFactors,
    config: LlamaConfig,
    *,
    tokenizer: Any = None,
    sha256: str | None = None,
    other_model: bool = False,
    where: str = "factors",
    quiet: bool = False,
) -> dict[str, Any]:
    """Compare the model that factors were found for with the given one; print a warning or note on stderr if they differ.

    Args:
        factors: The factors.
        config: The model's config.
        tokenizer: The model's tokenizer, if known.
        sha256: The hash of the model's weight files, if known.
        other_model: Whether to accept factors of another model.
        where: The factors' name in messages.
        quiet: Whether to print nothing.

    Returns:
        A record for results: `name` and `sha256` as the factors have them; `weights`, which is "same", "other", or "unknown" if
        either hash is missing; `differs`, the differences in words; and `other_model`.

    Raises:
        UserError: The model already contains factors, the factors' shape does not fit, or they belong to another model and
            `other_model` is False.
    """
    if not factors.changes_nothing:
        refuse_marked(config.mark, where)
    factors.for_model(config.num_layers, config.num_kv_heads, config.rotary_dim, where)
    model = factors.model
    differences = _differences(factors, config, tokenizer, where)
    differs = [f"{name} {_shown(recorded)}, here {_shown(here)}" for name, recorded, here in differences]
    found_for = f"found for {'another model' if differs else 'other weights'}"
    if isinstance(model.get("name"), str):
        found_for += f", {model['name']:.80}"
    if differs and not other_model:
        raise UserError(
            f"{where}: {found_for} ({'; '.join(differs)}); give factors found for this one, or --other-model "
            "(in Python other_model=True) to use these anyway"
        )
    weights = "unknown"
    if isinstance(model.get("sha256"), str) and sha256 is not None:
        weights = "same" if model["sha256"] == sha256 else "other"
    if differs:
        _say(f"warning: {where}: {found_for} ({'; '.join(differs)}), and used anyway", quiet)
    elif weights == "other":
        hashes = f"sha256 {model['sha256']:.8}, here {sha256:.8}"
        _say(f"warning: {where}: {found_for} of the same sizes ({hashes}): another quantisation, format or training", quiet)
    elif not model:
        _say(f"note: {where}: does not name the model it was found for, so only its shape was checked", quiet)
    kept = {name: model.get(name) for name in ("name", "sha256")}
    return {**kept, "weights": weights, "differs": differs, "other_model": other_model}


def check_loaded(factors: LayerFactors, loaded: Loaded, where: str, other_model: bool = False) -> dict[str, Any]:
    """`check_model` with everything that is known of a loaded model."""
    return check_model(
        factors,
        loaded.model.config,
        tokenizer=loaded.tokenizer,
        sha256=loaded.identity.get("sha256"),
        other_model=other_model,
        where=where,
    )


def _differences(factors: LayerFactors, config: LlamaConfig, tokenizer: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (entry, recorded value, value here) for everything that makes it another model."""
    here = facts(config, tokenizer if "tokenizer_sha256" in factors.model else None)
    for name in (*_SIZES, "tokenizer_sha256"):
        if name in factors.model and name in here and factors.model[name] != here[name]:
            yield name, factors.model[name], here[name]
    if factors.rope:
        yield from _rope_differences(factors, config, where)


def _rope_differences(factors: LayerFactors, config: LlamaConfig, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield nothing if frequencies and attention factor are equal at every length, even if they are written differently."""
    now, window = config.rope.to_hf(), factors.model.get("rope_window")
    if factors.rope == now and window in (None, config.rope.original_max_position_embeddings):
        return
    written = {"rope_parameters": factors.rope, "max_position_embeddings": window or config.max_position_embeddings}
    recorded = RopeParameters.from_hf(written, f"{where}: rope")
    if recorded.rotary_dim(config.head_dim) == config.rotary_dim and _same_angles(recorded, config.rope, config.head_dim):
        return
    then = recorded.to_hf()
    names = [name for name in sorted({*then, *now}) if not _close(then.get(name), now.get(name))]
    if recorded.rope_type != config.rope.rope_type:
        names = [name for name in names if name in ("rope_type", "rope_theta")]
    for name in names:
        yield name, then.get(name), now.get(name)
    if not names:
        trained = recorded.original_max_position_embeddings
        yield "the trained window of RoPE", trained, config.rope.original_max_position_embeddings


def _same_angles(one: RopeParameters, other: RopeParameters, head_dim: int) -> bool:
    windows = one.original_max_position_embeddings, other.original_max_position_embeddings
    lengths = {0, *windows, *(window + 1 for window in windows), 4 * max(windows)}
    with jax.ensure_compile_time_eval():  # also inside a user's jit
        return _close(one.attention_factor, other.attention_factor) and all(
            np.allclose(*(inverse_frequencies(rope, head_dim, length) for rope in (one, other)), rtol=_CLOSE, atol=0)
            for length in lengths
        )


def _close(one: Any, other: Any) -> bool:
    try:
        return bool(np.allclose(one, other, rtol=_CLOSE, atol=0))
    except (TypeError, ValueError):  # text, null, or lists of different lengths
        return one == other


def _shown(value: Any) -> str:
    if isinstance(value, str) and len(value) == 64:
        return value[:8]  # the first digits of a hash
    return f"{value!r:.60}"


def _say(line: str, quiet: bool) -> None:
    if not quiet and hosts.is_first():
        print(line, file=sys.stderr)
