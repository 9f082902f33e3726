"""Factors by gradient descent: the paper's baseline (Appendix C, Table 11), and with other settings our best optimiser.

The loss is, in nats,

    mean over the tasks (lengths) of the mean over a minibatch of  -weight(position) log p(gold answer | prompt)
    + text_weight x mean -log p of a token of plain text
    + penalty(parameters)

with teacher-forced answers, all admitted ones together. In a mixture each task counts by its weight, in nats an answer: an
answer is one thing to find, however many tokens it has. Losses per token were tried and drown what is copied: SmolLM2 starts
at 0.1 nats a token on UUIDs (34 tokens) and at 3.2 on documents' answers (3 tokens), against 2.5 to 5 and 11 nats an answer.

The loss of plain text is -log p of its tokens, or with `--text-objective kl` the KL divergence from the model as it is. The
first lets the parameters learn the kind of text that is given; the second keeps what the model does on it. Plain text in
windows of several lengths counts by the mean over the lengths of their losses.

Adam (optax) moves the parameters, and after each step they are put back into their box (projected gradient descent). A part of
the questions and of the text is held back: every few steps the loss on these is measured, and the parameters with the lowest
are the result, of those where plain text has not become less likely than is allowed: on the whole, or with several lengths in
any quarter of the longest windows, since far positions may get worse while the mean does not.

What the parameters are is the caller's: `apply(model, parameters)` gives the model and RoPE table that are scored. Layers are
rematerialised in the backward pass, so memory does not grow with their number. The model is an argument of every compiled
function. With several devices (the model's mesh) each has a part of the minibatch, and the gradients are added up; parameters
are everywhere.

Letters: B trees, P prompts of a tree, W windows of text, T tokens.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
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
from lpes_jax.search.minibatches import Data, Examples, Share, Windows, draws, spread, windows_a_step
from lpes_jax.settings.search import GradientSettings, TextSettings
from lpes_jax.text_nll import token_divergence, token_nll

Parameters = Any  # a pytree of float arrays
Apply = Callable[[Llama, Parameters], tuple[Llama, RopeTable]]
Total = Callable[[Float[Array, ""]], Float[Array, ""]]
QUARTERS = 4


class LossNotFinite(UserError):
    """A loss is NaN or infinite."""


class Look(NamedTuple):
    """What is seen every few steps, on what was held back.

    `loss` is the whole objective; `task_losses` (nats a prompt, by weight) and `accuracies`
    (prompts answered right, by weight) are of each task; `text_loss` is in nats a token, NaN without text. With text of several
    lengths `text_losses` are its parts, and `text_quarters` the losses in the quarters of the longest windows. `allowed`: text
    is no worse than it may be. With `--text-objective kl` `text_divergence` is that of each length, in nats a token.
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
    """All that a descent needs to go on after a look."""

    step: int
    parameters: Parameters
    optimizer: Any
    first_text_loss: float
    best: Look
    looks_since_best: int
    first_text_quarters: tuple[float, ...] = ()


def initial_state(parameters: Parameters, num_tasks: int, num_texts: int = 1, *, divergence: bool = False) -> State:
    """The state before anything is looked at: the structure of all later ones.

    `num_texts`: lengths of windows of text; `divergence`: their objective is the KL divergence.
    """
    unknown = (math.nan,) * num_tasks
    texts, quarters = ((math.nan,) * num_texts, (math.nan,) * QUARTERS) if num_texts > 1 else ((), ())
    apart = (math.nan,) * (num_texts * divergence)
    look = Look(0, math.nan, math.nan, unknown, unknown, math.nan, True, parameters, texts, quarters, apart)
    return State(0, parameters, _adam.init(parameters), math.nan, look, 0, quarters)


def prompt_scores(
    model: Llama, examples: Examples, table: RopeTable, *, remat: bool = False
) -> tuple[Bool[Array, "B P"], Float[Array, "B P"]]:
    """Of each prompt: is an admitted answer the greedy continuation, and log p of the admitted answers together."""
    correct, log_p = (
        scores.reshape(examples.is_row.shape)
        for scores in batch_scores(model, examples.batch, table_method(table), remat=remat)
    )
    return (correct & examples.is_row).any(axis=2), jax.nn.logsumexp(jnp.where(examples.is_row, log_p, -jnp.inf), axis=2)


def answer_loss(
    model: Llama, examples: Examples, table: RopeTable, *, weighted: bool = True, total: Total = lambda of_part: of_part
) -> Float[Array, ""]:
    """The mean of -log p of the answers, by weight or plain, differentiable in the table and the model.

    `total` adds up what the parts have, where the examples are a part of all: what comes out is this part's share of the mean.
    """
    _, log_p = prompt_scores(model, examples, table, remat=True)
    weights = (examples.weights if weighted else examples.is_prompt).astype(log_p.dtype)
    return -(weights * log_p).sum() / total(weights.sum())


def text_loss(
    model: Llama,
    windows: Int[Array, "W T"],
    table: RopeTable,
    counts: Bool[Array, "W"] | None = None,
    total: Total = lambda of_part: of_part,
    as_is: Llama | None = None,
) -> Float[Array, ""]:
    """The mean over the tokens of plain text but each window's first, in the windows that count (None: all), likewise.

    Of -log p of the token, or where there is a model `as_is` of the KL divergence from its distribution.
    """
    if as_is is None:
        losses = token_nll(model, windows, table_method(table), remat=True)[:, 1:]
    else:
        losses = _divergence(model, windows, table, as_is, remat=True)[:, 1:]
    if counts is None:
        return losses.mean()
    weights = counts.astype(losses.dtype)
    return (weights * losses.mean(axis=1)).sum() / total(weights.sum())


def _divergence(
    model: Llama, windows: Int[Array, "W T"], table: RopeTable, as_is: Llama, *, remat: bool = False
) -> Float[Array, "W T"]:
    own = table_method(as_is.config.rope_table(windows.shape[1]))
    return token_divergence(model, windows, table_method(table), as_is, own, remat=remat)


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
    """From `parameters` to the allowed look with the lowest loss; the start is the first look, and always allowed.

    Minibatches are drawn without replacement, in a new order each epoch, from `seed`. With `patience`, as many looks without
    a new best end it early. `resume` goes on behind a look: what `on_look` got with it. Raises UserError for settings that are
    out of bounds, and LossNotFinite for the loss of a step or of a look.
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
    with _partitioner(mesh):
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
    """Adam moves parameters out of the finite numbers only by a gradient that is not finite, for which no flag is to blame."""
    if all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(parameters)):
        return f"the loss is not finite after {step} steps; lower --learning-rate or narrow the bounds"
    return f"the gradient is not finite within the first {step} steps, though the loss was; try --dtype float32"


@contextlib.contextmanager
def _partitioner(mesh: Mesh) -> Iterator[None]:
    """GSPMD in here where several GPUs share the work. Its warning of GSPMD's end is XLA's."""
    name = "jax_use_shardy_partitioner"
    before = getattr(jax.config, name)
    jax.config.update(name, before and (mesh.size == 1 or not _shardy_crashes()))
    try:
        yield
    finally:
        jax.config.update(name, before)


def _shardy_crashes() -> bool:
    """XLA's pass for Shardy ended in a segmentation fault on these programs: jax 0.11.2, two H200s, the model whole on each.

    Ahead of time for two such devices, with one at hand, it did compile them, as GSPMD does for two and four and for a model
    axis of two. Once it does so on the devices themselves this can go.
    """
    return jax.default_backend() == "gpu"


@dataclass(frozen=True)
class _Goal:
    """What is compiled into a step, besides shapes."""

    apply: Apply
    project: Callable[[Parameters], Parameters]
    penalty: Callable[[Parameters], Float[Array, ""]] | None
    weighted: bool
    coefficients: tuple[float, ...] | None = None  # of the losses of the examples; None: all alike
    divergence: bool = False  # what text is kept by, in place of its -log p

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
        loss, gradient = _loss_and_gradient(goal, 1, lambda of_shard: of_shard, *inputs)
    else:
        of_shard = partial(_loss_and_gradient, goal, mesh.shape["population"], partial(jax.lax.psum, axis_name="population"))
        specs = EVERYWHERE, BY_POPULATION, BY_POPULATION, EVERYWHERE, EVERYWHERE
        loss, gradient = over_population(of_shard, mesh, specs, EVERYWHERE)(*inputs)
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
    """Of the whole minibatch, by one of the shards that have parts of it; `total` adds up what they have."""

    def objective(parameters: Parameters) -> Float[Array, ""]:
        tuned, table = goal.apply(model, parameters)
        losses = [answer_loss(tuned, examples, table, weighted=goal.weighted, total=total) for examples in tasks]
        loss = sum(losses) / len(tasks) if goal.coefficients is None else _weighted_sum(goal.coefficients, losses)
        as_is = model if goal.divergence else None
        if len(texts) == 1:
            loss = loss + text_weight * text_loss(tuned, texts[0].tokens, table, texts[0].counts, total, as_is)
        elif texts:
            of_texts = [text_loss(tuned, text.tokens, table, text.counts, total, as_is) for text in texts]
            loss = loss + text_weight * _weighted_sum([1 / len(texts)] * len(texts), of_texts)
        return loss + goal.regular(parameters) / shards

    return jax.tree.map(total, jax.value_and_grad(objective)(parameters))


def _weighted_sum(weights: Sequence[float], values: Sequence[Float[Array, ""]]) -> Float[Array, ""]:
    """In the values' own dtype."""
    return sum((jnp.asarray(weight, value.dtype) * value for weight, value in zip(weights, values, strict=True)), jnp.zeros(()))


@partial(jax.jit, static_argnames=("goal", "mesh"))
def _prompts_now(
    goal: _Goal, mesh: Mesh, model: Llama, examples: Examples, parameters: Parameters, at: Int[Array, "n"]
) -> tuple[Bool[Array, "n P"], Float[Array, "n P"]]:
    def scores(model: Llama, examples: Examples, parameters: Parameters, at: Int[Array, "n"]) -> tuple[Array, Array]:
        tuned, table = goal.apply(model, parameters)
        return prompt_scores(tuned, examples[at], table)

    return _over_indices(scores, mesh)(model, examples, parameters, at)


@partial(jax.jit, static_argnames=("goal", "mesh", "quarters"))
def _text_now(
    goal: _Goal,
    mesh: Mesh,
    model: Llama,
    text: Int[Array, "W T"],
    parameters: Parameters,
    at: Int[Array, "n"],
    quarters: bool = False,
) -> tuple[Float[Array, "..."], ...]:
    """The mean -log p of each window, with `quarters` that of its quarters [n, 4], and the divergence where that counts."""

    def means(model: Llama, text: Int[Array, "W T"], parameters: Parameters, at: Int[Array, "n"]) -> tuple[Array, ...]:
        tuned, table = goal.apply(model, parameters)
        nll = token_nll(tuned, text[at], table_method(table))[:, 1:]
        found = [nll.mean(axis=1)]
        if quarters:
            found.append(jnp.stack([part.mean(axis=1) for part in jnp.array_split(nll, QUARTERS, axis=1)], axis=1))
        if goal.divergence:
            found.append(_divergence(tuned, text[at], table, model)[:, 1:].mean(axis=1))
        return tuple(found)

    return _over_indices(means, mesh)(model, text, parameters, at)


def _over_indices(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """`function` with its last argument, and its results, split over a mesh."""
    specs = EVERYWHERE, EVERYWHERE, EVERYWHERE, BY_POPULATION
    return function if mesh.size == 1 else over_population(function, mesh, specs, BY_POPULATION)


def _placed(tree: Any, mesh: Mesh, spec: PartitionSpec = EVERYWHERE) -> Any:
    """On a mesh."""
    return put(tree, NamedSharding(mesh, spec))


def rises_within(bound: float | None, losses: Sequence[float], first: Sequence[float]) -> bool:
    """Whether no text loss (nats a token; the whole, or each quarter) lies more than `bound` above its first value."""
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
    losses, accuracies, of_text = [], [], math.nan
    for at, examples in enumerate(held_back.tasks):
        now = partial(_prompts_now, goal, mesh, model, examples, placed)
        trees = examples.trees_a_step(settings.minibatch_size * held_back.part(at))
        correct, log_p = _in_blocks(now, mesh, len(examples.weights), trees)
        weights = np.asarray(examples.weights, np.float64).ravel() / float(examples.weights.sum())
        losses.append(-float(weights @ log_p.ravel()))
        accuracies.append(float(weights @ correct.ravel()))
    if held_back.shares is None:
        loss = float(np.mean(losses)) + float(goal.regular(parameters))
    else:
        coefficients = [share.coefficient for share in held_back.shares]
        loss = float(np.dot(coefficients, losses)) + float(goal.regular(parameters))
        losses, accuracies = _by_task(held_back.shares, losses), _by_task(held_back.shares, accuracies)
    of_texts, quarters, divergences = [], (), []
    lengths = [windows.shape[1] for windows in held_back.texts]
    for windows, size in zip(held_back.texts, windows_a_step(lengths, text.text_minibatch), strict=True):
        in_quarters = len(lengths) > 1 and windows.shape[1] == max(lengths)
        now = partial(_text_now, goal, mesh, model, windows, placed, quarters=in_quarters)
        means, *more = _in_blocks(now, mesh, len(windows), size)
        of_texts.append(float(means.mean()))
        if in_quarters:
            quarters = tuple(more[0].mean(axis=0).tolist())
        if goal.divergence:
            divergences.append(float(more[-1].mean()))
    if of_texts:
        of_text = float(np.mean(of_texts)) if len(of_texts) > 1 else of_texts[0]
        loss += text.text_weight * (float(np.mean(divergences)) if goal.divergence else of_text)
    now_and_first = [], []
    if before is not None:
        now_and_first = (quarters, before.first_text_quarters) if quarters else ([of_text], [before.first_text_loss])
    allowed = rises_within(text.max_text_loss_rise, *now_and_first)
    several = tuple(of_texts) if len(of_texts) > 1 else ()
    seen = train_loss, loss, tuple(losses), tuple(accuracies), of_text, allowed, parameters
    return Look(number, *seen, several, quarters, tuple(divergences))


def _by_task(shares: Sequence[Share], values: Sequence[float]) -> list[float]:
    """The values of examples as means of their tasks."""
    found = [0.0] * (1 + max(share.task for share in shares))
    for share, value in zip(shares, values, strict=True):
        found[share.task] += share.part * value
    return found


def _in_blocks(
    scores: Callable[[Array], tuple[Array, ...]], mesh: Mesh, count: int, size: int
) -> tuple[Float[np.ndarray, "count ..."], ...]:
    """Scores of all indices 0 ... count - 1, about `size` at a time; all blocks have one shape, which a mesh divides."""
    shards = mesh.shape["population"]
    size, done = -(-min(size, count) // shards) * shards, []
    for start in range(0, count, size):
        at = np.minimum(np.arange(start, start + size, dtype=np.int32), count - 1)
        of_block = to_host(scores(_placed(jnp.asarray(at), mesh, BY_POPULATION)))
        done.append([part[: count - start] for part in of_block])
    return tuple(np.concatenate(parts).astype(np.float64) for parts in zip(*done, strict=True))
