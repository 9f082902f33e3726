"""Prompts of random tokens for the tiny model, and populations to score them with."""

import numpy as np

import lpes_jax as lj
from lpes_jax.generation import generate_ids
from lpes_jax.tasks.prompts import EncodedPrompt


def prompts_of(*lengths: int, answers: tuple[int, ...] = (3,), seed: int = 0) -> list[EncodedPrompt]:
    """Random ids; an answer of each length in `answers`."""
    rng = np.random.default_rng(seed)
    return [
        EncodedPrompt(rng.integers(0, 300, n).tolist(), [rng.integers(0, 300, a).tolist() for a in answers]) for n in lengths
    ]


def with_likely_answers(model: lj.Llama, prompts: list[EncodedPrompt]) -> list[EncodedPrompt]:
    """Every other prompt is given the model's own continuation as its first answer."""
    new = generate_ids(model, [prompt.ids for prompt in prompts], max_new_tokens=3)
    return [
        EncodedPrompt(prompt.ids, [ids[: len(prompt.answers[0])], *prompt.answers[1:]]) if index % 2 else prompt
        for index, (prompt, ids) in enumerate(zip(prompts, new, strict=True))
    ]


def population_of(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Factors from 1 to 2. The first individual has factors of 1, so that some verdicts are right."""
    factors = np.random.default_rng(seed).uniform(1, 2, shape)
    factors[0] = 1
    return factors
