"""Descents on random prompts, for the tests of gradient search and of several devices."""

import numpy as np

from lpes_jax.search.gradient import Look, descend
from lpes_jax.settings.search import GradientSettings, TextSettings
from lpes_jax.tasks.prompts import EncodedPrompt

NO_TEXT = TextSettings()


def looks_of(pieces, settings: GradientSettings, text: TextSettings = NO_TEXT, **more) -> tuple[list[Look], Look]:
    model, train, held_back, parameters, apply, project = pieces
    seen: list[Look] = []
    best = descend(
        model, train, more.pop("held_back", held_back), parameters, apply, settings, text, project=project,
        on_look=lambda measured, state: seen.append(measured), **more,
    )  # fmt: skip
    return seen, best


def haystacks(sizes: list[int], seed: int = 0) -> list[EncodedPrompt]:
    """`sizes[i]` questions about haystack i, with one or two answers; each is a prompt."""
    rng = np.random.default_rng(seed)

    def ids(length: int) -> list[int]:
        return rng.integers(1, 250, length).tolist()

    bodies = [(ids(62 + index), size) for index, size in enumerate(sizes)]
    return [
        EncodedPrompt(body + ids(4), [ids(2) for _ in range(1 + index % 2)]) for body, size in bodies for index in range(size)
    ]
