"""Factors by gradient descent: the paper's baseline (Appendix C, Table 11), and with other settings our best optimiser.

The loss is, in nats,

    mean over the tasks (lengths) of the mean over a minibatch of  -weight(position) log p(gold answer | prompt)
    + text_weight x mean -log p of a token of plain text
    + penalty(parameters)

with teacher-forced answers, all admitted ones together. Adam (optax) moves the parameters, and after each step they are put
back into their box (projected gradient descent). A part of the questions and of the text is held back: every few steps the
loss on these is looked at, and the parameters with the lowest are the result, of those looks where plain text has not become
less likely than is allowed.

What the parameters are is the caller's: `apply(model, parameters)` gives the model and RoPE table that are scored. Layers are
rematerialised in the backward pass, so memory does not grow with their number. The model is an argument of every compiled
function.

Letters: N prompts, R rows of a prompt (its admitted answers), B = N x R, W windows of text, T tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.models.llama.method import of_table
from lpes_jax.models.llama.model import Llama
from lpes_jax.prefixes import SharedBatch, pack_trees, tree_of
from lpes_jax.rope import RopeTable
from lpes_jax.scoring import batch_scores, token_nll
from lpes_jax.tasks.prompts import EncodedPrompt

Parameters = Any  # a pytree of float arrays
Apply = Callable[[Llama, Parameters], tuple[Llama, RopeTable]]


@dataclass(frozen=True)
class GradientSettings:
    """`minibatch_size` in prompts of a task, `text_minibatch` in windows, `learning_rate` in units of the parameters.

    Adam's steps are about as large as the learning rate. Raises UserError for what cannot be.
    """

    steps: int = 200
    learning_rate: float = 0.03
    schedule: Literal["cosine", "constant"] = "cosine"
    weights_in: Literal["loss", "sampling"] = "loss"
    minibatch_size: int = 24
    validation_share: float = 0.25
    look_every: int = 10
    patience: int = 0
    text_weight: float = 0.0
    text_minibatch: int = 4
    max_text_loss_rise: float | None = None

    def __post_init__(self):
        counts = {"steps": 1, "minibatch_size": 1, "look_every": 1, "patience": 0, "text_weight": 0, "text_minibatch": 1}
        for name, least in counts.items():
            if not getattr(self, name) >= least:
                raise UserError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise UserError(f"--learning-rate must be above 0, got {self.learning_rate}")
        if not 0 < self.validation_share < 1:
            raise UserError(f"--validation-share must be between 0 and 1, got {self.validation_share}")
        if self.max_text_loss_rise is not None and not self.max_text_loss_rise >= 0:
            raise UserError(f"--max-text-loss-rise must be at least 0, got {self.max_text_loss_rise}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Examples:
    """Prompts of one task, each a tree of R rows, of which `is_row` are answers of its own; the prompt itself is shared."""

    batch: SharedBatch
    is_row: Bool[Array, "N R"]
    weights: Float[Array, "N"]

    def __getitem__(self, at: Int[Array, "n"]) -> "Examples":
        return Examples(jax.tree.map(lambda leaf: leaf[at], self.batch), self.is_row[at], self.weights[at])


@dataclass(frozen=True)
class Data:
    """What a descent learns from, or looks at: prompts of each task, and windows of plain text (None: no text)."""

    tasks: Sequence[Examples]
    text: Int[Array, "W T"] | None = None


class Look(NamedTuple):
    """What is seen every few steps, on what was held back.

    `loss` is the whole objective; `task_losses` (nats a prompt, by weight) and `accuracies` (prompts answered right, by
    weight) are of each task; `text_loss` is in nats a token, NaN without text. `allowed`: text is no worse than it may be.
    """

    step: int
    train_loss: float
    loss: float
    task_losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    text_loss: float
    allowed: bool
    parameters: Parameters


class State(NamedTuple):
    """All that a descent needs to go on after a look."""

    step: int
    parameters: Parameters
    optimizer: Any
    first_text_loss: float
    best: Look
    looks_since_best: int


def initial_state(parameters: Parameters, num_tasks: int) -> State:
    """The state before anything is looked at: the structure of all later ones."""
    unknown = (math.nan,) * num_tasks
    look = Look(0, math.nan, math.nan, unknown, unknown, math.nan, True, parameters)
    return State(0, parameters, _adam.init(parameters), math.nan, look, 0)


def pack(prompts: Sequence[EncodedPrompt], weights: Sequence[float], most_answers: int = 2) -> Examples:
    """All prompts padded to one length, each with as many rows as the prompt with the most answers, `most_answers` at most.

    Every prompt has as many rows: a single question with thirteen admitted answers, as there is one in lost-in-the-middle's
    file, must not make all others dearer. The first answers are the usual ones.
    """
    admitted = [prompt.answers[:most_answers] for prompt in prompts]
    most = max(map(len, admitted))
    rows = [
        (prompt.ids, answer)
        for prompt, answers in zip(prompts, admitted, strict=True)
        for answer in answers + [answers[0]] * (most - len(answers))
    ]
    trees = [tree_of(rows, list(range(first, first + most))) for first in range(0, len(rows), most)]
    is_row = [[row % most < len(answers) for row in tree.rows] for tree, answers in zip(trees, admitted, strict=True)]
    return Examples(pack_trees(trees, rows), jnp.array(is_row), jnp.asarray(weights, jnp.float32))


def prompt_scores(
    model: Llama, examples: Examples, table: RopeTable, *, remat: bool = False
) -> tuple[Bool[Array, "N"], Float[Array, "N"]]:
    """Of each prompt: is an admitted answer the greedy continuation, and log p of the admitted answers together."""
    correct, log_p = (
        scores.reshape(examples.is_row.shape) for scores in batch_scores(model, examples.batch, of_table(table), remat=remat)
    )
    return (correct & examples.is_row).any(axis=1), jax.nn.logsumexp(jnp.where(examples.is_row, log_p, -jnp.inf), axis=1)


def answer_loss(model: Llama, examples: Examples, table: RopeTable, *, weighted: bool = True) -> Float[Array, ""]:
    """The mean of -log p of the answers, by weight or plain, differentiable in the table and the model."""
    _, log_p = prompt_scores(model, examples, table, remat=True)
    weights = examples.weights.astype(log_p.dtype) if weighted else jnp.ones_like(log_p)
    return -(weights * log_p).sum() / weights.sum()


def text_loss(model: Llama, windows: Int[Array, "W T"], table: RopeTable) -> Float[Array, ""]:
    """The mean of -log p of the tokens of plain text but each window's first, differentiable likewise."""
    return token_nll(model, windows, of_table(table), remat=True)[:, 1:].mean()


def descend(
    model: Llama,
    train: Data,
    held_back: Data,
    parameters: Parameters,
    apply: Apply,
    settings: GradientSettings,
    *,
    project: Callable[[Parameters], Parameters] = lambda parameters: parameters,
    penalty: Callable[[Parameters], Float[Array, ""]] | None = None,
    seed: int = 0,
    resume: State | None = None,
    on_look: Callable[[Look, State], None] = lambda look, state: None,
) -> Look:
    """From `parameters` to the allowed look with the lowest loss; the start is the first look, and always allowed.

    Minibatches are drawn without replacement, in a new order each epoch, from `seed`. With `patience`, as many looks without
    a new best end it early. `resume` goes on behind a look: what `on_look` got with it. Raises UserError where the loss is not
    finite.
    """
    goal = _Goal(apply, project, penalty, weighted=settings.weights_in == "loss")
    draws = _draws(train, settings, seed)
    if resume is None:
        first = _look(0, math.nan, goal, model, held_back, parameters, settings, None)
        state = initial_state(parameters, len(train.tasks))._replace(first_text_loss=first.text_loss, best=first)
        on_look(first, state)
    else:
        state = resume
        for _ in range(state.step):
            next(draws)
    rates = optax.cosine_decay_schedule(settings.learning_rate, settings.steps)
    losses: list[Array] = []
    parameters, moments = state.parameters, state.optimizer
    for number in range(state.step + 1, settings.steps + 1):
        if settings.patience and state.looks_since_best >= settings.patience:
            break
        rate = rates(number - 1) if settings.schedule == "cosine" else settings.learning_rate
        numbers = jnp.asarray(rate, jnp.float32), jnp.asarray(settings.text_weight, jnp.float32)
        parameters, moments, loss = _step(goal, model, *next(draws), parameters, moments, *numbers)
        losses.append(loss)
        if number % settings.look_every and number != settings.steps:
            continue
        train_loss = float(np.mean([float(loss) for loss in losses]))
        seen = _look(number, train_loss, goal, model, held_back, parameters, settings, state.first_text_loss)
        if not (math.isfinite(seen.train_loss) and math.isfinite(seen.loss)):
            raise UserError(f"the loss is not finite after {number} steps; lower --learning-rate or narrow the bounds")
        better = seen.allowed and seen.loss < state.best.loss
        best, since_best = (seen, 0) if better else (state.best, state.looks_since_best + 1)
        state = State(number, parameters, moments, state.first_text_loss, best, since_best)
        on_look(seen, state)
        losses = []
    return state.best


@dataclass(frozen=True)
class _Goal:
    """What is compiled into a step, besides shapes."""

    apply: Apply
    project: Callable[[Parameters], Parameters]
    penalty: Callable[[Parameters], Float[Array, ""]] | None
    weighted: bool

    def regular(self, parameters: Parameters) -> Float[Array, ""]:
        return jnp.zeros(()) if self.penalty is None else self.penalty(parameters)


_adam = optax.scale_by_adam()


@partial(jax.jit, static_argnames="goal")
def _step(
    goal: _Goal,
    model: Llama,
    tasks: list[Examples],
    text: Int[Array, "W T"] | None,
    parameters: Parameters,
    moments: Any,
    learning_rate: Float[Array, ""],
    text_weight: Float[Array, ""],
) -> tuple[Parameters, Any, Float[Array, ""]]:
    def objective(parameters: Parameters) -> Float[Array, ""]:
        tuned, table = goal.apply(model, parameters)
        loss = sum(answer_loss(tuned, examples, table, weighted=goal.weighted) for examples in tasks) / len(tasks)
        if text is not None:
            loss = loss + text_weight * text_loss(tuned, text, table)
        return loss + goal.regular(parameters)

    loss, gradient = jax.value_and_grad(objective)(parameters)
    updates, moments = _adam.update(gradient, moments)
    moved = jax.tree.map(lambda value, update: value - learning_rate.astype(value.dtype) * update, parameters, updates)
    return goal.project(moved), moments, loss


@partial(jax.jit, static_argnames="goal")
def _prompts_now(goal: _Goal, model: Llama, examples: Examples, parameters: Parameters, at: Int[Array, "n"]):
    tuned, table = goal.apply(model, parameters)
    return prompt_scores(tuned, examples[at], table)


@partial(jax.jit, static_argnames="goal")
def _text_now(goal: _Goal, model: Llama, text: Int[Array, "W T"], parameters: Parameters, at: Int[Array, "n"]):
    tuned, table = goal.apply(model, parameters)
    return (token_nll(tuned, text[at], of_table(table))[:, 1:].mean(axis=1),)


def _look(
    number: int,
    train_loss: float,
    goal: _Goal,
    model: Llama,
    held_back: Data,
    parameters: Parameters,
    settings: GradientSettings,
    first_text_loss: float | None,
) -> Look:
    losses, accuracies, of_text = [], [], math.nan
    for examples in held_back.tasks:
        now = partial(_prompts_now, goal, model, examples, parameters)
        correct, log_p = _in_blocks(now, len(examples.weights), settings.minibatch_size)
        weights = np.asarray(examples.weights, np.float64) / float(examples.weights.sum())
        losses.append(-float(weights @ log_p))
        accuracies.append(float(weights @ correct))
    loss = float(np.mean(losses)) + float(goal.regular(parameters))
    if held_back.text is not None:
        now = partial(_text_now, goal, model, held_back.text, parameters)
        [means] = _in_blocks(now, len(held_back.text), settings.text_minibatch)
        of_text = float(means.mean())
        loss += settings.text_weight * of_text
    rise = 0.0 if first_text_loss is None else of_text - first_text_loss
    allowed = settings.max_text_loss_rise is None or rise <= settings.max_text_loss_rise
    return Look(number, train_loss, loss, tuple(losses), tuple(accuracies), of_text, allowed, parameters)


def _draws(train: Data, settings: GradientSettings, seed: int) -> Iterator[tuple[list[Examples], Int[Array, "W T"] | None]]:
    """Minibatches of each task, and of the text, without end."""
    by_weight, size = settings.weights_in == "sampling", settings.minibatch_size
    of_tasks = [
        _minibatches(len(it.weights), size, seed + at, np.asarray(it.weights, np.float64) if by_weight else None)
        for at, it in enumerate(train.tasks)
    ]
    text = train.text
    of_text = None if text is None else _minibatches(len(text), settings.text_minibatch, seed + len(of_tasks))
    while True:
        tasks = [examples[jnp.asarray(next(at))] for examples, at in zip(train.tasks, of_tasks, strict=True)]
        yield tasks, None if of_text is None or text is None else text[jnp.asarray(next(of_text))]


def _minibatches(
    count: int, size: int, seed: int, weights: Float[np.ndarray, "count"] | None = None
) -> Iterator[Int[np.ndarray, "size"]]:
    """Indices of minibatches without end: drawn by weight, or in epochs.

    Each epoch is a new permutation, its short rest begins the next one.
    """
    rng, left = np.random.default_rng(seed), np.empty(0, np.int32)
    size = min(size, count)
    while weights is not None:
        yield rng.choice(count, size, replace=False, p=weights / weights.sum()).astype(np.int32)
    while True:
        if len(left) < size:
            left = np.concatenate([left, rng.permutation(count).astype(np.int32)])
        yield left[:size]
        left = left[size:]


def _in_blocks(scores: Callable[..., tuple[Array, ...]], count: int, size: int) -> tuple[Float[np.ndarray, "count"], ...]:
    """Scores of all indices 0 ... count - 1, `size` at a time; all blocks have one shape."""
    size, done = min(size, count), []
    for start in range(0, count, size):
        at = np.minimum(np.arange(start, start + size, dtype=np.int32), count - 1)
        done.append([np.asarray(part)[: count - start] for part in scores(jnp.asarray(at))])
    return tuple(np.concatenate(parts).astype(np.float64) for parts in zip(*done, strict=True))
