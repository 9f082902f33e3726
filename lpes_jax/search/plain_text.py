"""Plain text that factors must not make less likely: windows of a file, or text that the model generates.

Letters: W windows, T tokens.
"""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lpes_jax.errors import UserError
from lpes_jax.finite import not_finite
from lpes_jax.memory import tokens_that_fit
from lpes_jax.models.llama.generate import continuation
from lpes_jax.models.llama.method import table_method
from lpes_jax.models.llama.model import Llama, check_ids
from lpes_jax.settings.search import DEFAULT_WINDOW
from lpes_jax.tasks.perplexity import Window, windows_of

GENERATED_WINDOWS = 64
MOST_TOKENS = 2**18  # in the windows of each length, if there are several lengths


def text_windows(
    text: Path | None, model: Llama, tokenizer: Any, seed: int, length: int, most: int = 256
) -> Int[np.ndarray, "W T"]:
    """At most `most` windows of `length` tokens, spread evenly over the search part (the first 40 %) of the file `text`.

    Without a file, the model generates at most `GENERATED_WINDOWS` windows: sampled from its own distribution after a first
    token (BOS, or a random one if the tokenizer has none).

    Raises:
        UserError: The file cannot be read or is too short, the model does not have an id, or its logits are not finite.
    """
    length = min(length, model.config.max_position_embeddings)
    if length < 2:
        raise UserError(f"--text-window must be at least 2 tokens, got {length}")
    if text is not None:
        windows = _of_file(text, tokenizer, length)
        chosen = np.linspace(0, len(windows) - 1, min(len(windows), most)).astype(int)
        ids = np.array([windows[index].ids for index in chosen], np.int32)
        check_ids(model, ids)
        return ids
    count = min(GENERATED_WINDOWS, most)
    first = jax.random.randint(jax.random.key(seed), (count, 1), 0, min(len(tokenizer), model.config.vocab_size))
    if (bos := getattr(tokenizer, "bos_token_id", None)) is not None:
        first = jnp.full_like(first, bos)
    check_ids(model, np.asarray(first))
    # All at once unless a GPU's memory does not hold their caches. A CPU's memory is not known, so it is not considered.
    at_once = count if jax.default_backend() == "cpu" else min(count, tokens_that_fit(model, length, 1, cached=True) // length)
    parts, method = [], table_method(model.config.rope_table(length))
    for number, start in enumerate(range(0, count, at_once)):
        begin, key = first[start : start + at_once].astype(jnp.int32), jax.random.fold_in(jax.random.key(seed), 1 + number)
        lengths = jnp.ones(len(begin), jnp.int32)
        written, finite = continuation(model, begin, lengths, method, jnp.zeros(0, jnp.int32), length - 1, key)
        parts.append((np.asarray(jnp.concatenate([begin, written], axis=1)), np.asarray(finite)))
    windows, well = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    if not well.all():
        raise not_finite(model, windows[~well].tolist())
    return windows


def split_windows(
    text: Path | None, model: Llama, tokenizer: Any, seed: int, lengths: int | tuple[int, ...], kept_share: float
) -> tuple[list[Int[np.ndarray, "_W _T"]], list[Int[np.ndarray, "_W _T"]]]:
    """Windows of each length, shortest first: those to learn from, and those to hold back (`kept_share` of the text, its end).

    With several lengths, no token is on both sides, and the windows of each length have about `MOST_TOKENS` tokens at most.
    Without a file, the model generates the longest windows; shorter ones are their beginnings.

    Raises:
        UserError: As `text_windows`; a length is beyond the model's window; or the text is too short to hold a part back.
    """
    several = check_windows(lengths, model.config.max_position_embeddings)
    most = 256 if len(several) == 1 else most_windows(several[-1])
    train, held_back, border = [], [], None
    written = None if text is not None else text_windows(None, model, tokenizer, seed, several[-1], most)
    for length in reversed(several):
        if len(several) == 1:
            windows = text_windows(text, model, tokenizer, seed, length) if written is None else written
            first = len(windows) - math.ceil(kept_share * len(windows))
            kept, rest = windows[::-1][: len(windows) - first], windows[:first]
        elif written is not None:
            first = len(written) - math.ceil(kept_share * len(written))
            kept, rest = written[first:, :length], written[:first, :length]
        else:
            rest, kept, border = _around(text, tokenizer, length, kept_share, border)
            check_ids(model, np.concatenate([rest, kept]))
        if not len(rest) or not len(kept):
            which = "" if len(several) == 1 else f" in windows of {length} tokens"
            raise UserError(f"--text is too short to hold a part back{which}; give more of it")
        train.append(rest)
        held_back.append(kept)
    return train[::-1], held_back[::-1]


def check_windows(lengths: int | tuple[int, ...], window: int) -> list[int]:
    """The lengths, shortest first. Raises UserError for lengths that are invalid for a model with this window."""
    several = sorted(lengths) if isinstance(lengths, tuple) else [lengths]
    flag = f"--text-window {' '.join(map(str, several))}"
    if not several or several[0] < 2 or len(set(several)) < len(several):
        raise UserError(f"{flag}: give one length from 2 tokens on, or several, each once")
    if several[-1] > window and several != [DEFAULT_WINDOW]:
        raise UserError(f"{flag}: the model's window is {window} tokens; give lengths up to that")
    return several


def most_windows(length: int) -> int:
    """The most windows of one length, if there are several lengths."""
    return max(8, MOST_TOKENS // length)


def _around(
    text: Path | None, tokenizer: Any, length: int, kept_share: float, border: int | None
) -> tuple[Int[np.ndarray, "_W T"], Int[np.ndarray, "_H T"], int]:
    """Windows of one length before and after the token `border`, and `border` (None: the start of the held-back share)."""
    windows = _of_file(text, tokenizer, length)
    bos = getattr(tokenizer, "bos_token_id", None)
    new = length - (bos is not None and windows[0].ids[0] == bos)  # tokens of the text in each window
    starts = np.arange(len(windows)) * new
    if border is None:
        border = int(starts[len(windows) - math.ceil(kept_share * len(windows))])
    most = min(256, most_windows(length))
    sides = np.flatnonzero(starts + new <= border), np.flatnonzero(starts >= border)
    counts = most - math.ceil(kept_share * most), math.ceil(kept_share * most)
    chosen = [
        side[np.linspace(0, len(side) - 1, min(len(side), count)).astype(int)] if len(side) else side
        for side, count in zip(sides, counts, strict=True)
    ]
    rest, kept = (np.array([windows[index].ids for index in side], np.int32).reshape(len(side), length) for side in chosen)
    return rest, kept, border


def _of_file(text: Path | None, tokenizer: Any, length: int) -> list[Window]:
    return windows_of(text, tokenizer, length, "search")
