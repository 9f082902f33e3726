"""The loss of plain text by position: -log p per token in each eighth of windows of one length, for each candidate."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lpes_jax.errors import UserError
from lpes_jax.evaluate.perplexity import text_nlls
from lpes_jax.evaluation import Candidate
from lpes_jax.models.llama import Loaded
from lpes_jax.tasks.needle import sentence
from lpes_jax.tasks.perplexity import Window, slide, windows_of
from lpes_jax.tasks.prompts import token_ids

WINDOWS = 4
BINS = 8


def text_windows(loaded: Loaded, length: int, text: Path | None, seed: int) -> list[Window]:
    """Windows of `length` tokens spread over a text file, or of half, a quarter, ... as many if it is short.

    Without a file, the text consists of the needle grammar's sentences, different ones in each window. The loss falls with the
    position as the model learns the grammar. A rise shows the positions at which the model fails.

    Raises UserError if the file cannot be read, or is too short.
    """
    return _grammar_windows(loaded, length, seed) if text is None else _file_windows(loaded, length, text)


def text_loss(
    loaded: Loaded, candidates: Sequence[Candidate], windows: Sequence[Window], source: Path | None, batch_size: int | None
) -> dict[str, Any]:
    """Nats per token by the position in windows of text, and the text's source.

    Args:
        loaded: The model and its tokenizer.
        candidates: What is measured.
        windows: Of `text_windows`.
        source: The text file, or None.
        batch_size: Windows per pass and device; None means 1.
    """
    length = len(windows[0].ids)
    losses: dict[str, list[float]] = {}
    for candidate in candidates:
        nll = np.stack(text_nlls(loaded.model, windows, candidate, 1 if batch_size is None else batch_size))
        scored = nll[:, windows[0].scored :].mean(axis=0)
        losses[candidate.name] = [float(part.mean()) for part in np.array_split(scored, BINS)]
    starts = [int(part[0]) for part in np.array_split(np.arange(windows[0].scored, length), BINS)]
    return {
        "text": "sentences of the needle's grammar" if source is None else str(source),
        "window": length,
        "windows": len(windows),
        "from_position": starts,
        "nats_a_token": losses,
    }


def _file_windows(loaded: Loaded, length: int, text: Path) -> list[Window]:
    windows: list[Window] = []
    while not windows:
        try:
            windows = windows_of(text, loaded.tokenizer, length, "all")
        except UserError:
            if length < 128:
                raise
            length //= 2
    chosen = np.linspace(0, len(windows) - 1, min(WINDOWS, len(windows))).astype(int)
    return [windows[number] for number in chosen]


def _grammar_windows(loaded: Loaded, length: int, seed: int) -> list[Window]:
    bos = getattr(loaded.tokenizer, "bos_token_id", None)
    windows = []
    for number in range(WINDOWS):
        rng = random.Random(f"lpes profile text {seed} {number}")
        text: list[str] = []
        ids: list[int] = []
        while len(ids) < length:
            text += [sentence(rng) for _ in range(1 + length // 20)]
            [ids] = token_ids(loaded.tokenizer, [" ".join(text)])
        begin = [bos] if bos is not None and ids[:1] == [bos] else []
        windows.append(slide(ids[len(begin) :], length, length, begin)[0])
    return windows
