"""Scores by formula in the place of the model's, for tests of what a search makes of scores. Nothing is compiled for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from lpes_jax import evaluation
from lpes_jax.scores import Scores
from lpes_jax.scoring import Scorer
from lpes_jax.search import loop
from lpes_jax.search.scorers import make_scorer


class Analytic(Scorer):
    """Scores by formula: each prompt has factors of its own, and is answered right by those near to them."""

    def __call__(self, factors, granularity="layer", on_prompts=lambda count: None, **options) -> Scores:
        factors = np.nan_to_num(np.asarray(factors).reshape(len(factors), -1), posinf=9.0)
        wanted = np.random.default_rng(0).uniform(1, 2, (self.num_prompts, factors.shape[1]))
        distance = np.square(factors[:, None] - wanted).sum(axis=-1)
        on_prompts(distance.size)
        return Scores(distance < 0.25, -distance.astype(np.float32))


def scored_as(kind: type[Scorer], **attributes: object) -> Callable[..., Scorer]:
    """In the place of `make_scorer`."""

    def make(*arguments) -> Scorer:
        scorer = make_scorer(*arguments)
        scorer.__class__ = kind
        vars(scorer).update(attributes)
        return scorer

    return make


@contextmanager
def held_out_by_formula() -> Iterator[None]:
    """A search under it scores its individuals by the model, and held-out questions by formula."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "Scorer", Analytic)
        yield


@contextmanager
def held_out_left_out() -> Iterator[None]:
    """A search under it measures nothing on held-out questions: its reports are empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "evaluate", lambda *arguments, **options: [])
        yield
