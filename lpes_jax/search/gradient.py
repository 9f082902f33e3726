"""Layer factors by gradient descent: the paper's baseline (Appendix C, Table 11), and with other settings our best optimiser.

The loss of a question is -log p of its gold answer (of all admitted answers together) with its fact at each search position,
weighted by position; answers are teacher-forced behind the prompt. Adam (optax) moves what the factors are made of: the y's of
a curve's control points, or with `free` one factor a layer. After each step they are put back into the box (projected gradient
descent). A part of the search questions is held back: every few steps the loss on these is looked at, and the parameters with
the lowest loss are the result.

Layers are rematerialised in the backward pass, so memory does not grow with their number. The model is an argument of every
compiled function.

Letters: N prompts, R rows of a prompt (its admitted answers), B = N x R, L layers, C control points.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.models.llama.model import Llama
from lpes_jax.rope import Granularity, RopeTable, scale_layers
from lpes_jax.scoring import Batch, batch_scores, pack_rows
from lpes_jax.tasks.prompts import EncodedPrompt

FactorsOf = Callable[[Float[Array, "C 2"]], Float[Array, "L"]]


@dataclass(frozen=True)
class GradientSettings:
    """`minibatch_size` is in prompts, `learning_rate` in factors (Adam's steps are about as large). UserError where wrong."""

    steps: int = 200
    learning_rate: float = 0.03
    minibatch_size: int = 24
    validation_share: float = 0.25
    look_every: int = 10
    patience: int = 0

    def __post_init__(self):
        for name, least in (("steps", 1), ("minibatch_size", 1), ("look_every", 1), ("patience", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise UserError(f"--learning-rate must be above 0, got {self.learning_rate}")
        if not 0 < self.validation_share < 1:
            raise UserError(f"--validation-share must be between 0 and 1, got {self.validation_share}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Examples:
    """Prompts as rows: prompt n has the rows n R ... n R + R - 1, of which `is_row` are answers of its own."""

    batch: Batch
    is_row: Bool[Array, "N R"]
    weights: Float[Array, "N"]

    def __getitem__(self, at: Int[Array, "n"]) -> "Examples":
        rows = self.is_row.shape[1]
        of_prompts = (at[:, None] * rows + jnp.arange(rows)).ravel()
        return Examples(jax.tree.map(lambda leaf: leaf[of_prompts], self.batch), self.is_row[at], self.weights[at])


class Look(NamedTuple):
    """What is seen every few steps. Losses in nats a prompt; accuracy: the share of prompts answered right, by weight."""

    step: int
    train_loss: float
    validation_loss: float
    validation_accuracy: float
    points: Float[np.ndarray, "C 2"]
    factors: Float[np.ndarray, "L"]


def pack(prompts: Sequence[EncodedPrompt], weights: Sequence[float]) -> Examples:
    """All prompts padded to one length, each with as many rows as the prompt with the most answers."""
    most = max(len(prompt.answers) for prompt in prompts)
    rows, is_row = [], np.zeros((len(prompts), most), bool)
    for number, prompt in enumerate(prompts):
        answers = prompt.answers + [prompt.answers[0]] * (most - len(prompt.answers))
        rows += [(prompt.ids, answer) for answer in answers]
        is_row[number, : len(prompt.answers)] = True
    return Examples(pack_rows(rows), jnp.asarray(is_row), jnp.asarray(weights, jnp.float32))


def prompt_scores(
    model: Llama, examples: Examples, table: RopeTable, *, remat: bool = False
) -> tuple[Bool[Array, "N"], Float[Array, "N"]]:
    """Of each prompt: is an admitted answer the greedy continuation, and log p of the admitted answers together."""
    correct, log_p = (
        scores.reshape(examples.is_row.shape) for scores in batch_scores(model, examples.batch, table, remat=remat)
    )
    return (correct & examples.is_row).any(axis=1), jax.nn.logsumexp(jnp.where(examples.is_row, log_p, -jnp.inf), axis=1)


def weighted_loss(model: Llama, examples: Examples, table: RopeTable) -> Float[Array, ""]:
    """The weighted mean of -log p, differentiable in the table."""
    _, log_p = prompt_scores(model, examples, table, remat=True)
    return -(examples.weights.astype(log_p.dtype) * log_p).sum() / examples.weights.sum().astype(log_p.dtype)


def descend(
    model: Llama,
    train: Examples,
    validation: Examples,
    points: Float[np.ndarray, "C 2"],
    factors_of: FactorsOf,
    own: RopeTable,
    box: tuple[float, float],
    settings: GradientSettings,
    seed: int = 0,
    granularity: Granularity = "layer",
    on_look: Callable[[Look], None] = lambda look: None,
) -> Look:
    """From `points` (their y's move, within `box`) to the look with the lowest validation loss.

    `own` is the model's table, which the factors divide. Prompts of a minibatch are drawn without replacement, in a new order
    each epoch. The learning rate falls to 0 along a cosine. With `patience`, as many looks without a new best end it early.
    Raises UserError where the loss is not finite.
    """
    optimizer = optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.steps))
    x, low, high = jnp.asarray(points[:, 0], jnp.float32), *box

    def table_of(y: Float[Array, "C"]) -> tuple[RopeTable, Float[Array, "L"]]:
        factors = factors_of(jnp.stack([x, y], axis=1))
        return RopeTable(scale_layers(own.inv_freq, factors, granularity), own.attention_scaling), factors

    @jax.jit
    def step(model: Llama, examples: Examples, at: Array, y: Array, state: Any) -> tuple[Array, Any, Array]:
        loss, gradient = jax.value_and_grad(lambda y: weighted_loss(model, examples[at], table_of(y)[0]))(y)
        updates, state = optimizer.update(gradient, state)
        return optax.projections.projection_box(optax.apply_updates(y, updates), low, high), state, loss

    @jax.jit
    def scores(model: Llama, examples: Examples, at: Array, y: Array) -> tuple[Array, Array]:
        return prompt_scores(model, examples[at], table_of(y)[0])

    def look(number: int, train_loss: float, y: Array) -> Look:
        correct, log_p = _in_blocks(partial(scores, model, validation, y=y), len(validation.weights), settings.minibatch_size)
        weights = np.asarray(validation.weights, np.float64) / float(validation.weights.sum())
        moved = np.stack([np.asarray(x), np.asarray(y)], axis=1)
        factors = np.asarray(table_of(y)[1], np.float64)
        return Look(number, train_loss, -float(weights @ log_p), float(weights @ correct), moved, factors)

    y = jnp.asarray(points[:, 1], jnp.float32)
    state = optimizer.init(y)
    order = _minibatches(len(train.weights), settings.minibatch_size, seed)
    best = look(0, float("nan"), y)
    on_look(best)
    losses, since_best = [], 0
    for number in range(1, settings.steps + 1):
        y, state, loss = step(model, train, jnp.asarray(next(order)), y, state)
        losses.append(loss)
        if number % settings.look_every and number != settings.steps:
            continue
        seen = look(number, float(np.mean([float(loss) for loss in losses])), y)
        if not (np.isfinite(seen.train_loss) and np.isfinite(seen.validation_loss)):
            raise UserError(f"the loss is not finite after {number} steps; lower --learning-rate or narrow the bounds")
        on_look(seen)
        losses, since_best = [], since_best + 1
        if seen.validation_loss < best.validation_loss:
            best, since_best = seen, 0
        if settings.patience and since_best >= settings.patience:
            break
    return best


def _minibatches(count: int, size: int, seed: int):
    """Indices of minibatches without end; each epoch is a new permutation, its short rest begins the next one."""
    rng, left = np.random.default_rng(seed), np.empty(0, np.int32)
    size = min(size, count)
    while True:
        if len(left) < size:
            left = np.concatenate([left, rng.permutation(count).astype(np.int32)])
        yield left[:size]
        left = left[size:]


def _in_blocks(scores: Callable[..., tuple[Array, Array]], count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of all prompts, `size` at a time, all blocks of one shape."""
    size = min(size, count)
    done = []
    for start in range(0, count, size):
        at = np.minimum(np.arange(start, start + size), count - 1)
        done.append([np.asarray(part)[: count - start] for part in scores(at=jnp.asarray(at))])
    correct, log_p = (np.concatenate(parts) for parts in zip(*done, strict=True))
    return correct, log_p.astype(np.float64)
