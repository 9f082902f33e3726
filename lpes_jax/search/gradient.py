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
function. With several devices (the model's mesh) each has a part of the minibatch, and the gradients are added up; parameters
are everywhere.

Letters: B trees, P prompts of a tree, W windows of text, T tokens.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.mesh import BY_POPULATION, EVERYWHERE, make_mesh, mesh_of, on_one_device, over_population, put, put_model, to_host
from lpes_jax.models.llama.method import of_table
from lpes_jax.models.llama.model import Llama
from lpes_jax.rope import RopeTable
from lpes_jax.scoring import batch_scores
from lpes_jax.search.minibatches import Data, Examples, Windows, draws, spread
from lpes_jax.text_nll import token_nll

Parameters = Any  # a pytree of float arrays
Apply = Callable[[Llama, Parameters], tuple[Llama, RopeTable]]
Total = Callable[[Float[Array, ""]], Float[Array, ""]]


class LossNotFinite(UserError):
    """A loss is NaN or infinite."""


@dataclass(frozen=True)
class GradientSettings:
    """`minibatch_size` in prompts of a task (about so many where they share: see minibatches.py), `text_minibatch` in windows.

    `learning_rate` is in units of the parameters: Adam's steps are about as large. Raises UserError for what cannot be.
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


def prompt_scores(
    model: Llama, examples: Examples, table: RopeTable, *, remat: bool = False
) -> tuple[Bool[Array, "B P"], Float[Array, "B P"]]:
    """Of each prompt: is an admitted answer the greedy continuation, and log p of the admitted answers together."""
    correct, log_p = (
        scores.reshape(examples.is_row.shape) for scores in batch_scores(model, examples.batch, of_table(table), remat=remat)
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
) -> Float[Array, ""]:
    """The mean of -log p of the tokens of plain text but each window's first, of those that count (None: all), likewise."""
    nll = token_nll(model, windows, of_table(table), remat=True)[:, 1:]
    if counts is None:
        return nll.mean()
    weights = counts.astype(nll.dtype)
    return (weights * nll.mean(axis=1)).sum() / total(weights.sum())


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
    a new best end it early. `resume` goes on behind a look: what `on_look` got with it. Raises LossNotFinite for
    the loss of a step or of a look.
    """
    goal = _Goal(apply, project, penalty, weighted=settings.weights_in == "loss")
    mesh = _mesh(model)
    model = on_one_device(model) if mesh is None else put_model(model, mesh)
    look = partial(_look, goal, mesh, model, _placed(held_back.tasks, mesh), _placed(held_back.text, mesh), settings)
    minibatches = draws(
        train,
        minibatch_size=settings.minibatch_size,
        text_minibatch=settings.text_minibatch,
        by_weight=not goal.weighted,
        seed=seed,
    )
    with _partitioner(mesh):
        if resume is None:
            first = look(0, math.nan, parameters, None)
            state = initial_state(parameters, len(train.tasks))._replace(first_text_loss=first.text_loss, best=first)
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
            numbers = jnp.asarray(rate, jnp.float32), jnp.asarray(settings.text_weight, jnp.float32)
            minibatch = next(minibatches) if mesh is None else spread(next(minibatches), mesh)
            rest = _placed((parameters, moments, *numbers), mesh)
            parameters, moments, loss = _step(goal, mesh, model, *minibatch, *rest)
            losses.append(loss)
            if number % settings.look_every and number != settings.steps:
                continue
            train_loss = float(np.mean([float(loss) for loss in losses]))
            if mesh is not None:
                parameters, moments = jax.tree.map(jnp.asarray, to_host((parameters, moments)))
            seen = look(number, train_loss, parameters, state.first_text_loss)
            if not (math.isfinite(seen.train_loss) and math.isfinite(seen.loss)):
                raise LossNotFinite(f"the loss is not finite after {number} steps; lower --learning-rate or narrow the bounds")
            better = seen.allowed and seen.loss < state.best.loss
            best, since_best = (seen, 0) if better else (state.best, state.looks_since_best + 1)
            state = State(number, parameters, moments, state.first_text_loss, best, since_best)
            on_look(seen, state)
            losses = []
    return state.best


def _mesh(model: Llama) -> Mesh | None:
    """What minibatches are spread over: all devices, or the model's mesh. None for one device."""
    mesh = mesh_of(model) or make_mesh()
    return None if mesh.size == 1 else mesh


@contextlib.contextmanager
def _partitioner(mesh: Mesh | None) -> Iterator[None]:
    """GSPMD in here where several GPUs share the work. Its warning of GSPMD's end is XLA's."""
    name = "jax_use_shardy_partitioner"
    before = getattr(jax.config, name)
    jax.config.update(name, before and (mesh is None or not _shardy_crashes()))
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

    def regular(self, parameters: Parameters) -> Float[Array, ""]:
        return jnp.zeros(()) if self.penalty is None else self.penalty(parameters)


_adam = optax.scale_by_adam()


@partial(jax.jit, static_argnames=("goal", "mesh"))
def _step(
    goal: _Goal,
    mesh: Mesh | None,
    model: Llama,
    tasks: list[Examples],
    text: Windows | None,
    parameters: Parameters,
    moments: Any,
    learning_rate: Float[Array, ""],
    text_weight: Float[Array, ""],
) -> tuple[Parameters, Any, Float[Array, ""]]:
    inputs = model, tasks, text, parameters, text_weight
    if mesh is None:
        loss, gradient = _loss_and_gradient(goal, 1, lambda of_place: of_place, *inputs)
    else:
        of_place = partial(_loss_and_gradient, goal, mesh.shape["population"], partial(jax.lax.psum, axis_name="population"))
        specs = EVERYWHERE, BY_POPULATION, BY_POPULATION, EVERYWHERE, EVERYWHERE
        loss, gradient = over_population(of_place, mesh, specs, EVERYWHERE)(*inputs)
    updates, moments = _adam.update(gradient, moments)
    moved = jax.tree.map(lambda value, update: value - learning_rate.astype(value.dtype) * update, parameters, updates)
    return goal.project(moved), moments, loss


def _loss_and_gradient(
    goal: _Goal,
    places: int,
    total: Total,
    model: Llama,
    tasks: list[Examples],
    text: Windows | None,
    parameters: Parameters,
    text_weight: Float[Array, ""],
) -> tuple[Float[Array, ""], Parameters]:
    """Of the whole minibatch, by one of the places that have parts of it; `total` adds up what they have."""

    def objective(parameters: Parameters) -> Float[Array, ""]:
        tuned, table = goal.apply(model, parameters)
        losses = [answer_loss(tuned, examples, table, weighted=goal.weighted, total=total) for examples in tasks]
        loss = sum(losses) / len(tasks)
        if text is not None:
            loss = loss + text_weight * text_loss(tuned, text.tokens, table, text.counts, total)
        return loss + goal.regular(parameters) / places

    return jax.tree.map(total, jax.value_and_grad(objective)(parameters))


@partial(jax.jit, static_argnames=("goal", "mesh"))
def _prompts_now(
    goal: _Goal, mesh: Mesh | None, model: Llama, examples: Examples, parameters: Parameters, at: Int[Array, "n"]
) -> tuple[Bool[Array, "n P"], Float[Array, "n P"]]:
    def scores(model: Llama, examples: Examples, parameters: Parameters, at: Int[Array, "n"]) -> tuple[Array, Array]:
        tuned, table = goal.apply(model, parameters)
        return prompt_scores(tuned, examples[at], table)

    return _over_indices(scores, mesh)(model, examples, parameters, at)


@partial(jax.jit, static_argnames=("goal", "mesh"))
def _text_now(
    goal: _Goal, mesh: Mesh | None, model: Llama, text: Int[Array, "W T"], parameters: Parameters, at: Int[Array, "n"]
) -> tuple[Float[Array, "n"]]:
    def means(model: Llama, text: Int[Array, "W T"], parameters: Parameters, at: Int[Array, "n"]) -> tuple[Array]:
        tuned, table = goal.apply(model, parameters)
        return (token_nll(tuned, text[at], of_table(table))[:, 1:].mean(axis=1),)

    return _over_indices(means, mesh)(model, text, parameters, at)


def _over_indices(function: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """`function` with its last argument, and its results, split over a mesh."""
    specs = EVERYWHERE, EVERYWHERE, EVERYWHERE, BY_POPULATION
    return function if mesh is None else over_population(function, mesh, specs, BY_POPULATION)


def _placed(tree: Any, mesh: Mesh | None, spec: PartitionSpec = EVERYWHERE) -> Any:
    """On a mesh, if there is one."""
    return tree if mesh is None else put(tree, NamedSharding(mesh, spec))


def _look(
    goal: _Goal,
    mesh: Mesh | None,
    model: Llama,
    tasks: Sequence[Examples],
    text: Int[Array, "W T"] | None,
    settings: GradientSettings,
    number: int,
    train_loss: float,
    parameters: Parameters,
    first_text_loss: float | None,
) -> Look:
    placed = _placed(parameters, mesh)
    losses, accuracies, of_text = [], [], math.nan
    for examples in tasks:
        now = partial(_prompts_now, goal, mesh, model, examples, placed)
        correct, log_p = _in_blocks(now, mesh, len(examples.weights), examples.trees_a_step(settings.minibatch_size))
        weights = np.asarray(examples.weights, np.float64).ravel() / float(examples.weights.sum())
        losses.append(-float(weights @ log_p.ravel()))
        accuracies.append(float(weights @ correct.ravel()))
    loss = float(np.mean(losses)) + float(goal.regular(parameters))
    if text is not None:
        now = partial(_text_now, goal, mesh, model, text, placed)
        [means] = _in_blocks(now, mesh, len(text), settings.text_minibatch)
        of_text = float(means.mean())
        loss += settings.text_weight * of_text
    rise = 0.0 if first_text_loss is None else of_text - first_text_loss
    allowed = settings.max_text_loss_rise is None or rise <= settings.max_text_loss_rise
    return Look(number, train_loss, loss, tuple(losses), tuple(accuracies), of_text, allowed, parameters)


def _in_blocks(
    scores: Callable[[Array], tuple[Array, ...]], mesh: Mesh | None, count: int, size: int
) -> tuple[Float[np.ndarray, "count ..."], ...]:
    """Scores of all indices 0 ... count - 1, about `size` at a time; all blocks have one shape, which a mesh divides."""
    places = 1 if mesh is None else mesh.shape["population"]
    size, done = -(-min(size, count) // places) * places, []
    for start in range(0, count, size):
        at = np.minimum(np.arange(start, start + size, dtype=np.int32), count - 1)
        of_block = to_host(scores(_placed(jnp.asarray(at), mesh, BY_POPULATION)))
        done.append([part[: count - start] for part in of_block])
    return tuple(np.concatenate(parts).astype(np.float64) for parts in zip(*done, strict=True))
