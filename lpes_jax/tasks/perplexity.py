"""Perplexity of any text file, in sliding windows and by position in the window.

    task = Perplexity(data=Path("book.txt"), window=4096, stride=1024)
    windows = task.windows(tokenizer, "test")
    nlls = [ ... ]  # per window: -log p of each token in nats [T]; the first token has none, and its entry is not read
    perplexity(windows, nlls), perplexity_by_position(windows, nlls, num_bins=8)

With a stride below the window, each token is scored once, with at least window - stride tokens before it. With stride = window
(the default), windows do not overlap and every position is scored, as `perplexity_by_position` requires. The paper's first
version measures extrapolation on PG19 in this way, with windows longer than the model was trained on.

The first 40 % of the file's tokens are for `search`, the others for `test`; no window crosses the border.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.tasks.data import need_file
from lpes_jax.tasks.prompts import Split, Tokenizer, token_ids
from lpes_jax.text_files import UNREADABLE, read_text

_FEWER = "use a shorter --window or a lower --limit"


@dataclass(frozen=True)
class Window:
    """Token ids. Those from index `scored` on are scored, those before are context. A tokenizer's BOS is never scored."""

    ids: list[int]
    scored: int


@dataclass(frozen=True)
class Perplexity:
    """The task `perplexity`: windows of tokens in place of prompts. Raises UserError for invalid settings."""

    data: Path | None = None
    window: int = 2048
    stride: int | None = None

    name: ClassVar[str] = "perplexity"

    def __post_init__(self):
        check_bounds(self)
        need_file(self.data, "any text file in UTF-8")
        if self.stride is not None and self.stride > self.window:
            raise UserError(f"--stride {self.stride} must be from 1 to --window {self.window}")

    def windows(self, tokenizer: Tokenizer, split: Split = "test", count: int | None = None) -> list[Window]:
        """The first `count` full windows (None: all) of the split; a remainder shorter than a window is dropped."""
        assert self.data is not None
        try:
            text = read_text(self.data)
        except UNREADABLE as error:
            raise UserError(f"--data {self.data}: not readable as UTF-8 text ({error})") from error
        [ids] = token_ids(tokenizer, [text])
        bos = getattr(tokenizer, "bos_token_id", None)
        begin = [bos] if bos is not None and ids[:1] == [bos] else []
        ids, border = ids[len(begin) :], int(0.4 * (len(ids) - len(begin)))
        ids = {"search": ids[:border], "test": ids[border:], "all": ids}[split]
        found = slide(ids, self.window, self.window if self.stride is None else self.stride, begin)
        if count is not None and count < 1:
            raise UserError(f"--limit must be at least 1, got {count}")
        if len(found) < (least := 1 if count is None else count):
            raise UserError(
                f"--data {self.data}: {least} windows of {self.window} tokens asked for, its {split!r} part has "
                f"{len(found)} ({len(ids)} tokens); {_FEWER}"
            )
        return found[:count]


def windows_of(text: Path | None, tokenizer: Tokenizer, length: int, split: Split) -> list[Window]:
    """All windows of a `--text`, as `Perplexity.windows`. Raises UserError, with messages about this flag."""
    try:
        return Perplexity(text, window=length).windows(tokenizer, split)
    except UserError as error:
        raise UserError(str(error).replace("--data", "--text").replace(_FEWER, "give a longer text")) from None


def slide(ids: Sequence[int], window: int, stride: int, begin: Sequence[int] = ()) -> list[Window]:
    """Windows of `window` tokens, including `begin` before each; all but the first score only the tokens that are new."""
    length = window - len(begin)
    stride = min(stride, length)
    starts = range(0, len(ids) - length + 1, stride)
    return [
        Window([*begin, *ids[start : start + length]], max(1, len(begin)) if start == 0 else max(1, window - stride))
        for start in starts
    ]


def mean_nll(windows: Sequence[Window], nlls: Sequence[np.ndarray]) -> float:
    """The mean of -log p over all scored tokens, in nats per token."""
    scored = np.concatenate([np.asarray(nll, np.float64)[window.scored :] for window, nll in zip(windows, nlls, strict=True)])
    return float(scored.mean())


def perplexity(windows: Sequence[Window], nlls: Sequence[np.ndarray]) -> float:
    """exp of the mean over all scored tokens; infinity if that overflows a float."""
    return _exp(mean_nll(windows, nlls))


def perplexity_by_position(windows: Sequence[Window], nlls: Sequence[np.ndarray], num_bins: int = 8) -> list[tuple[int, float]]:
    """(first position of a bin, perplexity of the scored tokens in it) for bins of equal width, without empty bins."""
    length = max(len(window.ids) for window in windows)
    width = -(-length // num_bins)
    positions = np.concatenate([np.arange(window.scored, len(window.ids)) for window in windows])
    nll = np.concatenate([np.asarray(nll, np.float64)[window.scored :] for window, nll in zip(windows, nlls, strict=True)])
    bins = positions // width
    return [(int(b) * width, _exp(float(nll[bins == b].mean()))) for b in np.unique(bins)]


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
