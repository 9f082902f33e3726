"""What `compare` gives the methods' `choices`, and questions to learn from, for tests."""

from typing import Any

import numpy as np

from lpes_jax.factors import LayerFactors
from lpes_jax.methods import Tuning
from lpes_jax.models.llama import Llama
from lpes_jax.tasks.prompts import Prompt


def tuning(model: Llama, **changes: Any) -> Tuning:
    """A task without short answers, so that nothing can be scored. Text and learning raise AssertionError."""

    def not_called(*arguments: Any) -> Any:
        raise AssertionError("not for this method or setting")

    given = {"budget": 3, "seed": 0, "factors": LayerFactors(np.array([1.0, 1.5, 0.7])), "factors_from": "f.json"}
    given |= {"router": None, "text": not_called, "text_from": "", "router_steps": 1, "router_batch": 1, "channel_strings": 1}
    return Tuning(model, None, **given | {"score": lambda maker: None, "learn": not_called} | changes)


def questions(count: int) -> list[Prompt]:
    """Questions at two positions, all with one answer."""
    rng = np.random.default_rng(0)
    return [
        Prompt("".join(rng.choice(list("abcdefgh "), 24)) + " =", (" x",), "x", str(number), position, position // 100, 2)
        for number in range(count)
        for position in (0, 100)
    ]
