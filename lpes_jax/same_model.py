"""Are factors used with the model that they were found for?

    found = LayerFactors(values, model=identity | facts(config, tokenizer), rope=config.rope.to_hf())
    record = check_model(found, config, tokenizer=tokenizer, sha256=identity["sha256"])  # UserError for another model's factors

A factors.json says of its model: its sizes, its RoPE, a hash of its tokenizer, and the sha256 of its weight files. Other sizes,
another RoPE or another tokenizer are another model: refused, unless the user asks for it (`--other-model`, in Python
`other_model=True`). Other weights of the same sizes may be another quantisation or another format of the same model: a
warning. What a file does not say is not checked; files of the first release say RoPE, layers and sha256.

The same model has several spellings, by its format, and all of these agree: Llama 3's RoPE has its rule in a Hugging Face
folder and the divisors that follow from it in a GGUF file, so frequencies are compared and not names; and of tokenizers the
ids of a text and the first pieces of the vocabulary, not how the pipeline is written down.
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
_CLOSE = 2e-5  # GGUF files hold float32 where a config.json has decimals
_PIECES = 4096  # the first of a vocabulary; what pads its end differs by format
_TEXT = (  # begins with a letter: formats of one model may put a space before a text that does not, or none
    "The value of key-0f3c is 8417 (3.14159, 2,048 tokens, $1.5e-10) and don't ask why:\n\n  def f(x):\n\treturn x ** 2  # ok\n"
    'A UUID "2a8d601d-1d69-4e64-9f90-8ad825a74195"; Ça, naïve, Zürich, cafe\u0301, Ångström; Привет, мир! 東京で 漢字 🙂👍🏽'
)


def facts(config: LlamaConfig, tokenizer: Any = None) -> dict[str, Any]:
    """What a factors.json says of its model beside name and sha256: JSON, to stand under `model`."""
    found: dict[str, Any] = {name: getattr(config, name) for name in _SIZES}
    if config.rope.original_max_position_embeddings:
        found["rope_window"] = config.rope.original_max_position_embeddings  # `dynamic` does not say so itself
    if tokenizer is not None:
        found["tokenizer_sha256"] = tokenizer_sha256(tokenizer)
    return found


def tokenizer_sha256(tokenizer: Any) -> str:
    """A hash that two formats of one tokenizer share: of the ids of a text, and of the first pieces of the vocabulary."""
    pieces = tokenizer.convert_ids_to_tokens(range(min(len(tokenizer), _PIECES)))
    pieces = [(at, piece) for at, piece in enumerate(pieces) if piece is not None and not piece.startswith("[PAD")]
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
    """What results say of the factors' model; `tokenizer` and `sha256` (of the weight files) are the model's, where known.

    `name` and `sha256` as recorded; `weights`: "same", "other", or "unknown" where either hash is not known; `differs`: what
    makes it another model, in words; `other_model`: whether that was asked for. One line on stderr says what is not as it
    was, and that a file names no model at all (not where `quiet`).

    Raises UserError for a model that holds factors already, for factors whose shape does not fit, and for those of another
    model unless `other_model`.
    """
    if not factors.changes_nothing:
        refuse_marked(config.mark, where)
    factors.for_model(config.num_layers, config.num_kv_heads, config.rotary_dim, where)
    model = factors.model
    differences = _differences(factors, config, tokenizer, where)
    differs = [f"{name} {_shown(then)}, here {_shown(now)}" for name, then, now in differences]
    found_for = f"found for {'another model' if differs else 'other weights'}"
    if isinstance(model.get("name"), str):
        found_for += f", {model['name']:.80}"
    if differs and not other_model:
        raise UserError(
            f"{where}: {found_for} ({'; '.join(differs)}); give factors found for this one, or --other-model "
            "(in Python other_model=True) to try these all the same"
        )
    weights = "unknown"
    if isinstance(model.get("sha256"), str) and sha256 is not None:
        weights = "same" if model["sha256"] == sha256 else "other"
    if differs:
        _say(f"warning: {where}: {found_for} ({'; '.join(differs)}), and used all the same", quiet)
    elif weights == "other":
        hashes = f"sha256 {model['sha256']:.8}, here {sha256:.8}"
        _say(f"warning: {where}: {found_for} of the same sizes ({hashes}): another quantisation, format or training", quiet)
    elif not model:
        _say(f"note: {where}: names no model that it was found for, so its shape alone was checked", quiet)
    kept = {name: model.get(name) for name in ("name", "sha256")}
    return {**kept, "weights": weights, "differs": differs, "other_model": other_model}


def check_loaded(factors: LayerFactors, loaded: Loaded, where: str, other_model: bool = False) -> dict[str, Any]:
    """`check_model` with all that is known of a loaded model."""
    return check_model(
        factors,
        loaded.model.config,
        tokenizer=loaded.tokenizer,
        sha256=loaded.identity.get("sha256"),
        other_model=other_model,
        where=where,
    )


def _differences(factors: LayerFactors, config: LlamaConfig, tokenizer: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """(what, as recorded, here) of all that makes it another model."""
    here = facts(config, tokenizer if "tokenizer_sha256" in factors.model else None)
    for name in (*_SIZES, "tokenizer_sha256"):
        if name in factors.model and name in here and factors.model[name] != here[name]:
            yield name, factors.model[name], here[name]
    if factors.rope:
        yield from _rope_differences(factors, config, where)


def _rope_differences(factors: LayerFactors, config: LlamaConfig, where: str) -> Iterator[tuple[str, Any, Any]]:
    """None where the frequencies and the attention factor are the same at every length, however these are written down."""
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
    with jax.ensure_compile_time_eval():  # inside of a user's jit too
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
        return value[:8]  # of a hash its first digits
    return f"{value!r:.60}"


def _say(line: str, quiet: bool) -> None:
    if not quiet and hosts.is_first():
        print(line, file=sys.stderr)
