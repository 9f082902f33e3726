"""Individuals of a population, as arrays and as lines of history.

Letters: P population, L layers.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from lpes_jax.factors import json_of


class Individuals(NamedTuple):
    """Factors `[P, L, *units]`, and gains (None if they are not learnt); or those of one individual, without P."""

    factors: Float[np.ndarray, "..."]
    gains: Float[np.ndarray, "..."] | None = None

    @classmethod
    def of(cls, factors: Any, gains: Any = None) -> "Individuals":
        """Individuals as NumPy arrays, from any arrays."""
        return cls(np.asarray(factors), None if gains is None else np.asarray(gains))

    def select(self, chosen: Any) -> "Individuals":
        """One individual, by its index, or several."""
        return Individuals(self.factors[chosen], None if self.gains is None else self.gains[chosen])

    @property
    def key(self) -> tuple:
        """What the scores of one individual depend on."""
        factors = self.factors.shape, self.factors.tobytes()
        return factors if self.gains is None else (*factors, self.gains.shape, self.gains.tobytes())

    @property
    def record(self) -> dict[str, list]:
        """One individual as the history has it."""
        record = {"factors": rounded(self.factors)}
        return record if self.gains is None else record | {"gains": rounded(self.gains)}


def rounded(factors: Float[np.ndarray, "L *units"]) -> list:
    """Factors as the history has them: rounded, null for an infinite one."""
    return json_of(np.round(factors.astype(np.float64), 7))
