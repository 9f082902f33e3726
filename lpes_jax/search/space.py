"""What a search moves, and the factors that it makes: control points of a curve, for a layer or for each part of a layer.

    space = search_space(settings, config)
    factors = space.factors(space.x, space.y)            # [L] at granularity `layer`, [L, 8] with eight bands, ...

A space has C control points. Their x are layers, counted from the first that is scaled; their y are factors: one for each
point, or with a finer granularity one for each point and unit (frequency band, KV group) of a layer, each unit a curve of its
own. With `free` the points are the layers. With `shared` they are the dimensions of a head, and all layers have the same
factors (as LongRoPE has). Layers that `--layers` leaves out have factor 1.

Letters: C control points, L layers, K key-value heads.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lpes_jax.curves import CURVES
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.rope import Granularity

LEAST_GAP = 0.05  # between neighbouring x, in layers, where a gradient moves them


@dataclass(frozen=True)
class Space:
    """`x` `[C]` and `y` `[C, *units]` are where a search starts; `low` and `high` are the box of y. Factors without unit."""

    num_layers: int
    layers: range
    curve: str
    granularity: Granularity
    x: Float[np.ndarray, "C"]
    y: Float[np.ndarray, "C *units"]
    low: float
    high: float

    def factors(self, x: Float[Array | np.ndarray, "C"], y: Float[Array | np.ndarray, "C *units"]) -> Float[Array, "L ..."]:
        """The factors of all layers, of every granularity but `layer` with the axes of its units. Traceable."""
        y = jnp.asarray(y)
        x = jnp.asarray(x, y.dtype)
        if self.curve == "shared":
            scaled = jnp.broadcast_to(y, (len(self.layers), len(y)))
        else:

            def of_unit(y: Float[Array, "C"]) -> Float[Array, "layers"]:
                return CURVES[self.curve](jnp.stack([x, y], axis=1), len(self.layers))

            units = y.reshape(len(y), -1)
            scaled = jax.vmap(of_unit, in_axes=1, out_axes=1)(units).reshape(-1, *y.shape[1:])
        factors = jnp.ones((self.num_layers, *scaled.shape[1:]), y.dtype)
        return factors.at[self.layers.start : self.layers.stop].set(scaled)

    def in_order(self, x: Float[Array, "C"]) -> Float[Array, "C"]:
        """x with its ends on the first and the last scaled layer and neighbours at least `LEAST_GAP` apart."""
        last, count = len(self.layers) - 1.0, len(self.x)
        placed = [jnp.zeros_like(x[0])]
        for at in range(1, count - 1):
            placed.append(jnp.clip(x[at], placed[-1] + LEAST_GAP, last - LEAST_GAP * (count - 1 - at)))
        return jnp.stack([*placed, jnp.full_like(x[0], last)])

    def starting_from(self, factors: LayerFactors, where: str) -> "Space":
        """The space with its start at factors that another search found: its control points, or with `free` its factors.

        Raises UserError where they are none of this space.
        """
        if factors.num_layers != self.num_layers:
            raise UserError(f"{where}: {factors.num_layers} layers of factors, but the model has {self.num_layers}")
        if self.curve == "free":
            found = factors.factors[self.layers.start : self.layers.stop]
            if factors.granularity == "layer":
                found = np.broadcast_to(found.reshape(len(found), *(1 for _ in self.y.shape[1:])), self.y.shape)
            elif factors.granularity != self.granularity or found.shape != self.y.shape:
                raise UserError(
                    f"{where}: factors of granularity {factors.granularity}; give --granularity and --bands as there"
                )
            return replace(self, y=np.clip(found, self.low, self.high))
        points = np.array((factors.curve or {}).get("control_points") or [])
        if (factors.curve or {}).get("type") != self.curve or points.shape != (len(self.x), 2) or self.y.ndim > 1:
            raise UserError(
                f"{where}: holds no {len(self.x)} control points of a {self.curve} curve; give --curve and "
                "--control-points as that search had them, or --curve free"
            )
        return replace(self, x=points[:, 0], y=np.clip(points[:, 1], self.low, self.high))
