"""Factors by gradient descent: the paper's baseline (Appendix C, Table 11), and with other settings our best optimiser.

The loss is, in nats,

    mean over the tasks (lengths) of the mean over a minibatch of  -weight(position) log p(gold answer | prompt)
    + text_weight x mean -log p of a token of plain text
    + penalty(parameters)

Answers are teacher-forced; the probabilities of all admitted answers are added up. In a mixture the loss of each task is in
nats per answer, times its weight, so that an answer counts once, however many tokens it has. With losses per token, copied
answers would hardly count: SmolLM2 starts at 0.1 nats per token on UUIDs (34 tokens) and at 3.2 on documents' answers (3
tokens). Per answer these are 2.5 to 5 nats and 11 nats.

The loss of plain text is -log p of its tokens, or with `--text-objective kl` the KL divergence from the unchanged model. With
-log p, the parameters may learn this kind of text; the KL divergence keeps the model's behaviour on it. With windows of several
lengths, the loss of plain text is the mean over the lengths.

Adam (optax) updates the parameters, and each step ends with a projection onto their box (projected gradient descent). A part
of the questions and of the text is held back. Every few steps the loss on the held-back part is measured (a `Look`). The
result is the parameters with the lowest held-back loss, among those that do not raise the loss of plain text by more than
`--max-text-loss-rise`. This limit is for the mean, or with several lengths for each quarter of the longest windows, because the
loss at far positions can rise while the mean does not.

The caller defines the parameters: `apply(model, parameters)` gives the model and RoPE table to score. Layers are
rematerialised in the backward pass, so memory does not grow with their number. The model is an argument of every compiled
function. Each of several devices (the model's mesh) has a part of the minibatch and all parameters; gradients are summed.

Letters: B groups, P prompts per group, W windows of text, T tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.mesh import BY_POPULATION, EVERYWHERE, make_mesh, mesh_of, over_population, put, to_host
from lpes_jax.models.llama.method import table_method
from lpes_jax.models.llama.model import Llama
from lpes_jax.models.llama.sharding import put_model
from lpes_jax.rope import RopeTable
from lpes_jax.scores import batch_scores
from lpes_jax.search.minibatches import Data, Examples, Share, Windows, draws, spread, windows_per_step
from lpes_jax.settings.search import GradientSettings, TextSettings
from lpes_jax.text_nll import token_divergence, token_nll

Parameters = Any  # a pytree of float arrays
Apply = Callable[[Llama, Parameters], tuple[Llama, RopeTable]]
Total = Callable[[Float[Array, ""]], Float[Array, ""]]
QUARTERS = 4


class LossNotFinite(UserError):
    """A loss is NaN or infinite."""


class Look(NamedTuple):
    """One measurement on the held-back data, made every few steps.

    Attributes:
        step: The number of steps before it.
        train_loss: The mean loss of the minibatches since the last look; NaN for the first look.
        loss: The whole objective.
        task_losses: Of each task, in nats per prompt, weighted by position.
        accuracies: Of each task, the share of prompts with a correct answer, weighted by position.
        text_loss: In nats per token; NaN without text.
        allowed: Whether the loss of plain text has risen by no more than `--max-text-loss-rise`.
        parameters: The parameters that were measured.
        text_losses: With text of several lengths, the loss of each length.
        text_quarters: With text of several lengths, the losses in the quarters of the longest windows.
        text_divergence: With `--text-objective kl`, the divergence of each length, in nats per token.
    """

    step: int
    train_loss: float
    loss: float
    task_losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    text_loss: float
    allowed: bool
    parameters: Parameters
    text_losses: tuple[float, ...] = ()
    text_quarters: tuple[float, ...] = ()
    text_divergence: tuple[float, ...] = ()


class State(NamedTuple):
    """All that a descent needs to continue after a look."""

    step: int
    parameters: Parameters
    optimizer: Any
    first_text_loss: float
    best: Look
    looks_since_best: int
    first_text_quarters: tuple[float, ...] = ()


def initial_state(parameters: Parameters, num_tasks: int, num_texts: int = 1, *, divergence: bool = False) -> State:
    """The state before the first look, which has the structure of all later states.

    Args:
        parameters: The initial parameters.
        num_tasks: The number of tasks.
        num_texts: The number of lengths of windows of text.
        divergence: Whether the objective of text is the KL divergence.
    """
    unknown = (math.nan,) * num_tasks
    texts, quarters = ((math.nan,) * num_texts, (math.nan,) * QUARTERS) if num_texts > 1 else ((), ())
    divergences = (math.nan,) * (num_texts * divergence)
    empty = Look(0, math.nan, math.nan, unknown, unknown, math.nan, True, parameters, texts, quarters, divergences)
    return State(0, parameters, _adam.init(parameters), math.nan, empty, 0, quarters)


def prompt_scores(
    model: Llama, examples: Examples, table: RopeTable, *, remat: bool = False
) -> tuple[Bool[Array, "B P"], Float[Array, "B P"]]:
    """For each prompt: whether an admitted answer is the greedy continuation, and log p of all admitted answers together."""
    correct, log_p = (
        scores.reshape(examples.is_row.shape)
        for scores in batch_scores(model, examples.batch, table_method(table), remat=remat)
    )
    return (correct & examples.is_row).any(axis=2), jax.nn.logsumexp(jnp.where(examples.is_row, log_p, -jnp.inf), axis=2)


def answer_loss(
    model: Llama, examples: Examples, table: RopeTable, *, weighted: bool = True, total: Total = lambda value: value
) -> Float[Array, ""]:
    """The weighted or plain mean of -log p of the answers, in nats, differentiable in the table and the model.

    If the examples are one shard of a minibatch, `total` sums a value over the shards; the result is this shard's share of the
    mean.
    """
    _, log_p = prompt_scores(model, examples, table, remat=True)
    weights = (examples.weights if weighted else examples.is_prompt).astype(log_p.dtype)
    return -(weights * log_p).sum() / total(weights.sum())


def text_loss(
    model: Llama,
    windows: Int[Array, "W T"],
    table: RopeTable,
    counts: Bool[Array, "W"] | None = None,
    total: Total = lambda value: value,
    reference: Llama | None = None,
) -> Float[Array, ""]:
    """The mean loss of plain text, in nats per token, over all tokens but each window's first. Differentiable.

    The loss is -log p of the token, or with a `reference` model the KL divergence from its distribution. `counts` marks the
    windows that are not padding (None: all). `total` is that of `answer_loss`.
    """
    if reference is None:
        losses = token_nll(model, windows, table_method(table), remat=True)[:, 1:]
    else:
        losses = _divergence(model, windows, table, reference, remat=True)[:, 1:]
    if counts is None:
        return losses.mean()
    weights = counts.astype(losses.dtype)
    return (weights * losses.mean(axis=1)).sum() / total(weights.sum())


def _divergence(
    model: Llama, windows: Int[Array, "W T"], table: RopeTable, reference: Llama, *, remat: bool = False
) -> Float[Array, "W T"]:
    own = table_method(reference.config.rope_table(windows.shape[1]))
    return token_divergence(model, windows, table_method(table), reference, own, remat=remat)


def descend(
    model: Llama,
    train: Data,
    held_back: Data,
    parameters: Parameters,
    apply: Apply,
    settings: GradientSettings,
    text: TextSettings,
    *,
    project: Callable[[Parameters], Parameters] = lambda parameters: parameters,
    penalty: Callable[[Parameters], Float[Array, ""]] | None = None,
    seed: int = 0,
    resume: State | None = None,
    on_look: Callable[[Look, State], None] = lambda look, state: None,
) -> Look:
    """Run gradient descent, and return the allowed look with the lowest loss.

    The first look is at the initial parameters and is always allowed. Minibatches are drawn without replacement, in a new order
    each epoch. `patience` looks without a new best end the descent early.

    Args:
        model: The model.
        train: The data to learn from.
        held_back: The data to measure on.
        parameters: The initial parameters.
        apply: Gives the model and RoPE table of given parameters.
        settings: The settings of the descent.
        text: The settings of plain text.
        project: Projects parameters onto their box, after each step.
        penalty: A term of the loss, from the parameters only.
        seed: Of the minibatches.
        resume: The state to continue from, as `on_look` got it.
        on_look: Called after each look, with the state to resume from.

    Raises:
        UserError: A setting is out of bounds.
        LossNotFinite: The loss of a step or of a look is NaN or infinite.
    """
    check_bounds(settings)
    check_bounds(text)
    coefficients = None if train.shares is None else tuple(share.coefficient for share in train.shares)
    goal = _Goal(apply, project, penalty, settings.weights_in == "loss", coefficients, text.text_objective == "kl")
    mesh = mesh_of(model) or make_mesh()
    model = put_model(model, mesh)
    placed = replace(held_back, tasks=_placed(held_back.tasks, mesh), text=_placed(held_back.texts, mesh))
    look = partial(_look, goal, mesh, model, placed, settings, text)
    minibatches = draws(
        train,
        minibatch_size=settings.minibatch_size,
        text_minibatch=text.text_minibatch,
        by_weight=not goal.weighted,
        seed=seed,
    )
    if resume is None:
        first = look(0, math.nan, parameters, None)
        texts = len(held_back.texts)
        state = initial_state(parameters, train.num_tasks, texts, divergence=goal.divergence)._replace(
            first_text_loss=first.text_loss, best=first, first_text_quarters=first.text_quarters
        )
        on_look(first, state)
    else:
        state = resume
        for _ in range(state.step):
            next(minibatches)
    rates = optax.cosine_decay_schedule(settings.learning_rate, settings.steps)
    losses: list[Array] = []
    parameters, moments = state.parameters, state.optimizer
    for number in range(state.step + 1, settings.steps + 1):
        if settings.patience and state.looks_since_best >= settings.patience:
            break
        rate = rates(number - 1) if settings.schedule == "cosine" else settings.learning_rate
        numbers = jnp.asarray(rate, jnp.float32), jnp.asarray(text.text_weight, jnp.float32)
        rest = _placed((parameters, moments, *numbers), mesh)
        parameters, moments, loss = _step(goal, mesh, model, *spread(next(minibatches), mesh), *rest)
        losses.append(loss)
        if number % settings.look_every and number != settings.steps:
            continue
        train_loss = float(np.mean([float(loss) for loss in losses]))
        parameters, moments = jax.tree.map(jnp.asarray, to_host((parameters, moments)))
        seen = look(number, train_loss, parameters, state)
        if not (math.isfinite(seen.train_loss) and math.isfinite(seen.loss)):
            raise LossNotFinite(_what_is_not_finite(number, parameters))
        better = seen.allowed and seen.loss < state.best.loss
        best, since_best = (seen, 0) if better else (state.best, state.looks_since_best + 1)
        state = State(number, parameters, moments, state.first_text_loss, best, since_best, state.first_text_quarters)
        on_look(seen, state)
        losses = []
    return state.best


def _what_is_not_finite(step: int, parameters: Parameters) -> str:
    """The reason for a loss that is not finite. Only an infinite gradient makes parameters infinite, which no flag causes."""
    if all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(parameters)):
        return f"the loss is not finite after {step} steps; lower --learning-rate or narrow the bounds"
    return f"the gradient is not finite within the first {step} steps, though the loss was; try --dtype float32"


@dataclass(frozen=True)
class _Goal:
    """The static arguments of a compiled step."""

    apply: Apply
    project: Callable[[Parameters], Parameters]
    penalty: Callable[[Parameters], Float[Array, ""]] | None
    weighted: bool
    coefficients: tuple[float, ...] | None = None  # of the losses of the examples; None: equal
    divergence: bool = False  # the loss of text is the KL divergence, not -log p

    def regular(self, parameters: Parameters) -> Float[Array, ""]:
        return jnp.zeros(()) if self.penalty is None else self.penalty(parameters)


_adam = optax.scale_by_adam()


@partial(jax.jit, static_argnames=("goal", "mesh"))
def _step(
    goal: _Goal,
    mesh: Mesh,
    model: Llama,
    tasks: list[Examples],
    texts: list[Windows],
    parameters: Parameters,
    moments: Any,
    learning_rate: Float[Array, ""],
    text_weight: Float[Array, ""],
) -> tuple[Parameters, Any, Float[Array, ""]]:
    inputs = model, tasks, texts, parameters, text_weight
    if mesh.size == 1:  # nothing to split, and nothing to add up
        loss, gradient = _loss_and_gradient(goal, 1, lambda share: share, *inputs)
    else:
        one_shard = partial(_loss_and_gradient, goal, mesh.shape["population"], partial(jax.lax.psum, axis_name="population"))
        specs = EVERYWHERE, BY_POPULATION, BY_POPULATION, EVERYWHERE, EVERYWHERE
        loss, gradient = over_population(one_shard, mesh, specs, EVERYWHERE)(*inputs)
    updates, moments = _adam.update(gradient, moments)
    moved = jax.tree.map(lambda value, update: value - learning_rate.astype(value.dtype) * update, parameters, updates)
    return goal.project(moved), moments, loss


def _loss_and_gradient(
    goal: _Goal,
    shards: int,
    total: Total,
    model: Llama,
    tasks: list[Examples],
    texts: list[Windows],
    parameters: Parameters,
    text_weight: Float[Array, ""],
) -> tuple[Float[Array, ""], Parameters]:
    """The loss and gradient of the whole minibatch, on one of the `shards` that have parts of it. `total` sums over shards."""

    def objective(parameters: Parameters) -> Float[Array, ""]:
        tuned, table = goal.apply(model, parameters)
        losses = [answer_loss(tuned, examples, table, weighted=goal.weighted, total=total) for examples in tasks]
        loss = sum(losses) / len(tasks) if goal.coefficients is None else _weighted_sum(goal.coefficients, losses)
        as_is = model if goal.divergence else None
        if len(texts) == 1:
            loss = loss + text_weight * text_loss(tuned, texts[0].tokens, table, texts[0].counts, total, as_is)
        elif texts:
            losses_by_length = [text_loss(tuned, text.tokens, table, text.counts, total, as_is) for text in texts]
            loss = loss + text_weight * _weighted_sum([1 / len(texts)] * len(texts), losses_by_length)
        return loss + goal.regular(parameters) / shards

    return jax.tree.map(total, jax.value_and_grad(objective)(parameters))


def _weighted_sum(weights: Sequence[float], values: Sequence[Float[Array, ""]]) -> Float[Array, ""]:
    """The weighted sum, in the values' own dtype."""
    return sum((jnp.asarray(weight, value.dtype) * value for weight, value in zip(weights, values, strict=True)), jnp.zeros(()))


@partial(jax.jit, static_argnames=("goal", "mesh"))
def _prompts_now(
    goal: _Goal, mesh: Mesh, model: Llama, examples: Examples, parameters: Parameters, indices: Int[Array, "n"]
) -> tuple[Bool[Array, "n P"], Float[Array, "n P"]]:
    def scores(model: Llama, examples: Examples, parameters: Parameters, indices: Int[Array, "n"]) -> tuple[Array, Array]:
        tuned, table = goal.apply(model, parameters)
        return prompt_scores(tuned, examples[indices], table)

    return _over_indices(scores, mesh)(model, examples, parameters, indices)


@partial(jax.jit, static_argnames=("goal", "mesh", "quarters"))
def _text_now(
    goal: _Goal,
    mesh: Mesh,
    model: Llama,
    text: Int[Array, "W T"],
    parameters: Parameters,
    indices: Int[Array, "n"],
    quarters: bool = False,
) -> tuple[Float[Array, "..."], ...]:
    """The mean -log p of each window; with `quarters` also of its quarters [n, 4]; with goal.divergence also its divergence."""

    def means(model: Llama, text: Int[Array, "W T"], parameters: Parameters, indices: Int[Array, "n"]) -> tuple[Array, ...]:
        tuned, table = goal.apply(model, parameters)
        nll = token_nll(tuned, text[indices], table_method(table))[:, 1:]
        columns = [nll.mean(axis=1)]
        if quarters:
            columns.append(jnp.stack([quarter.mean(axis=1) for quarter in jnp.array_split(nll, QUARTERS, axis=1)], axis=1))
        if goal.divergence:
            columns.append(_divergence(tuned, text[indices], table, model)[:, 1:].mean(axis=1))
        return tuple(columns)

    return _over_indices(means, mesh)(model, text, parameters, indices)


def _over_indices(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """`function`, with its last argument and its results sharded over a mesh."""
    specs = EVERYWHERE, EVERYWHERE, EVERYWHERE, BY_POPULATION
    return function if mesh.size == 1 else over_population(function, mesh, specs, BY_POPULATION)


def _placed(values: Any, mesh: Mesh, spec: PartitionSpec = EVERYWHERE) -> Any:
    """Put the leaves of a pytree on a mesh."""
    return put(values, NamedSharding(mesh, spec))


def rises_within(bound: float | None, losses: Sequence[float], first: Sequence[float]) -> bool:
    """Whether no text loss (in nats per token; the mean, or each quarter) is more than `bound` above its first value."""
    return bound is None or all(now - start <= bound for now, start in zip(losses, first, strict=True))


def _look(
    goal: _Goal,
    mesh: Mesh,
    model: Llama,
    held_back: Data,
    settings: GradientSettings,
    text: TextSettings,
    number: int,
    train_loss: float,
    parameters: Parameters,
    before: State | None,
) -> Look:
    placed = _placed(parameters, mesh)
    losses, accuracies, mean_text_loss = [], [], math.nan
    for index, examples in enumerate(held_back.tasks):
        scores = partial(_prompts_now, goal, mesh, model, examples, placed)
        num_groups = examples.groups_per_step(settings.minibatch_size * held_back.part(index))
        correct, log_p = _in_blocks(scores, mesh, len(examples.weights), num_groups)
        weights = np.asarray(examples.weights, np.float64).ravel() / float(examples.weights.sum())
        losses.append(-float(weights @ log_p.ravel()))
        accuracies.append(float(weights @ correct.ravel()))
    if held_back.shares is None:
        loss = float(np.mean(losses)) + float(goal.regular(parameters))
    else:
        coefficients = [share.coefficient for share in held_back.shares]
        loss = float(np.dot(coefficients, losses)) + float(goal.regular(parameters))
        losses, accuracies = _by_task(held_back.shares, losses), _by_task(held_back.shares, accuracies)
    text_losses, quarters, divergences = [], (), []
    lengths = [windows.shape[1] for windows in held_back.texts]
    for windows, size in zip(held_back.texts, windows_per_step(lengths, text.text_minibatch), strict=True):
        by_quarter = len(lengths) > 1 and windows.shape[1] == max(lengths)
        scores = partial(_text_now, goal, mesh, model, windows, placed, quarters=by_quarter)
        means, *more = _in_blocks(scores, mesh, len(windows), size)
        text_losses.append(float(means.mean()))
        if by_quarter:
            quarters = tuple(more[0].mean(axis=0).tolist())
        if goal.divergence:
            divergences.append(float(more[-1].mean()))
    if text_losses:
        mean_text_loss = float(np.mean(text_losses)) if len(text_losses) > 1 else text_losses[0]
        loss += text.text_weight * (float(np.mean(divergences)) if goal.divergence else mean_text_loss)
    compared = [], []
    if before is not None:
        compared = (quarters, before.first_text_quarters) if quarters else ([mean_text_loss], [before.first_text_loss])
    allowed = rises_within(text.max_text_loss_rise, *compared)
    by_length = tuple(text_losses) if len(text_losses) > 1 else ()
    measured = train_loss, loss, tuple(losses), tuple(accuracies), mean_text_loss, allowed, parameters
    return Look(number, *measured, by_length, quarters, tuple(divergences))


def _by_task(shares: Sequence[Share], values: Sequence[float]) -> list[float]:
    """The mean over each task's examples of their values."""
    means = [0.0] * (1 + max(share.task for share in shares))
    for share, value in zip(shares, values, strict=True):
        means[share.task] += share.part * value
    return means


def _in_blocks(
    scores: Callable[[Array], tuple[Array, ...]], mesh: Mesh, count: int, size: int
) -> tuple[Float[np.ndarray, "count ..."], ...]:
    """Scores of the indices 0 .. count - 1, about `size` at a time. All blocks have one size, a multiple of the shards."""
    shards = mesh.shape["population"]
    size, done = -(-min(size, count) // shards) * shards, []
    for start in range(0, count, size):
        indices = np.minimum(np.arange(start, start + size, dtype=np.int32), count - 1)
        results = to_host(scores(_placed(jnp.asarray(indices), mesh, BY_POPULATION)))
        done.append([column[: count - start] for column in results])
    return tuple(np.concatenate(parts).astype(np.float64) for parts in zip(*done, strict=True))
