"""What a gradient descent learns from: prompts in trees, windows of plain text, and minibatches of both.

Prompts that are alike but for their ends, as several questions about the same pairs, are read as one tree (`shared_trees`), and
a step takes whole trees: as many as hold about `minibatch_size` prompts. The loss of given prompts is the same; which prompts
meet in a step is not. With g the part of the variance of a prompt's gradient that its haystack has, a step of k trees of m
prompts has a variance of (g + (1 - g) / m) / k, at the cost of k prompts and k m ends. With g = 0.1 (0.00 and 0.07 either way
measured with the bundled model) and ends of 5 %, 5 trees of 5 have 1.3 times the variance of 24 prompts of as many haystacks
at a quarter of the cost, and 2 trees of 12 have 2.1 times at an eighth. As the variance bounds the learning rate too, a tree
has a quarter of a minibatch at most: four trees a step or more (two or more, for minibatches below 16). The prompts of a
question follow each other in a tree, so that all positions are about as often in it. Where trees would not halve the cost, as
with pairs of their own for each question, each prompt is a tree, as it is where prompts are drawn by weight.

With several devices each has a part of a minibatch, filled up with trees and windows that count for nothing: see `spread`.

Letters: N prompts, B trees, P prompts of a tree, R rows of a prompt (its admitted answers), W windows of text, T tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.mesh import BY_POPULATION, put
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.prefixes import Batch, Costs, families, make_group, pack_groups
from lpes_jax.tasks.prompts import EncodedPrompt


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Examples:
    """Prompts of one task in trees, R rows a prompt, of which `is_row` are answers of its own; all that is alike is shared.

    Where a tree has fewer than P prompts, the others have the weight 0 and log p = 0.
    """

    batch: Batch
    is_row: Bool[Array, "B P R"]
    weights: Float[Array, "B P"]

    @property
    def is_prompt(self) -> Bool[Array, "B P"]:
        return self.batch.is_answer.any(axis=2).reshape(self.is_row.shape).any(axis=2)

    def trees_a_step(self, minibatch_size: int | float) -> int:
        """How many trees have about so many prompts; at least one, and at most all."""
        trees = len(self.weights)
        return min(trees, max(1, round(minibatch_size * trees / int(self.is_prompt.sum()))))

    def __getitem__(self, at: Int[Array, "n"]) -> "Examples":
        return Examples(jax.tree.map(lambda leaf: leaf[at], self.batch), self.is_row[at], self.weights[at])


class Share(NamedTuple):
    """What examples are among all: of which task (its number), their part of its prompts, and the weight of the task's loss."""

    task: int
    part: float
    weight: float

    @property
    def coefficient(self) -> float:
        """Of the examples' nats a prompt in the objective."""
        return self.weight * self.part


@dataclass(frozen=True)
class Data:
    """What a descent learns from, or looks at: prompts of each task, and windows of plain text (None: no text).

    `shares` says what each of `tasks` is, where a task may have several (one a shape) or counts more than others; None: each is
    a task, and all count alike. `text` of several lengths is a list, the longest last.
    """

    tasks: Sequence[Examples]
    text: Int[Array, "W T"] | Sequence[Int[Array, "_W _T"]] | None = None
    shares: tuple[Share, ...] | None = None

    @property
    def texts(self) -> list[Int[Array, "_W _T"]]:
        """The windows of each length."""
        if self.text is None:
            return []
        return [self.text] if isinstance(self.text, Array) else list(self.text)

    @property
    def num_tasks(self) -> int:
        return len(self.tasks) if self.shares is None else 1 + max(share.task for share in self.shares)

    def part(self, at: int) -> float:
        """What part of a minibatch of its task the examples `at` have."""
        return 1.0 if self.shares is None else self.shares[at].part


class Windows(NamedTuple):
    """Plain text of a minibatch. `counts`: those that are not there to fill it up; None: all."""

    tokens: Int[Array, "W T"]
    counts: Bool[Array, "W"] | None = None


def sizes(train: Data, held_back: Data, minibatch_size: int) -> dict[str, float]:
    """For the record: prompts (a mean) and trees of a step, and prompts of a look, of all tasks together."""
    trees = [it.trees_a_step(minibatch_size * train.part(at)) for at, it in enumerate(train.tasks)]
    prompts = [number * int(it.is_prompt.sum()) / len(it.weights) for number, it in zip(trees, train.tasks, strict=True)]
    held = sum(int(it.is_prompt.sum()) for it in held_back.tasks)
    return {"prompts_a_step": sum(prompts), "trees_a_step": sum(trees), "prompts_a_look": held}


def shared_trees(prompts: Sequence[EncodedPrompt], config: LlamaConfig, most: int) -> list[list[int]]:
    """The prompts of each tree, `most` at most: those that are alike, in trees of equal size, in their order.

    Each prompt alone where that, all trees padded to the largest, would cost more than half as much.
    """
    rows = [(prompt.ids, prompt.answers[0]) for prompt in prompts]
    cut = [part.tolist() for it in families(rows) for part in np.array_split(it, math.ceil(len(it) / max(1, most)))]
    alone = [[at] for at in range(len(rows))]

    def cost(trees: list[list[int]]) -> float:
        prefix, branches = (max(widths) for widths in zip(*(make_group(rows, it).shape for it in trees), strict=True))
        return len(trees) * Costs.of(config, jax.default_backend()).group(prefix, branches)

    return cut if len(cut) < len(alone) and cost(cut) <= cost(alone) / 2 else alone


def prompts_of_a_tree(minibatch_size: int) -> int:
    """At most so many: see above."""
    return max(minibatch_size // 4, min(minibatch_size // 2, 4))


def pack(
    prompts: Sequence[EncodedPrompt],
    weights: Sequence[float],
    trees: Sequence[Sequence[int]] | None = None,
    *,
    most_answers: int = 2,
) -> Examples:
    """All trees (indices of prompts; None: each prompt alone) padded to one shape.

    Every prompt has as many rows as the one with the most answers, `most_answers` at most: a single question with thirteen
    admitted answers, as there is one in lost-in-the-middle's file, must not make all others dearer. The first answers are the
    usual ones.
    """
    admitted = [prompt.answers[:most_answers] for prompt in prompts]
    most = max(map(len, admitted))
    rows = [
        (prompt.ids, answer)
        for prompt, answers in zip(prompts, admitted, strict=True)
        for answer in answers + [answers[0]] * (most - len(answers))
    ]
    of_trees = [[at] for at in range(len(prompts))] if trees is None else trees
    is_row = np.zeros((len(of_trees), max(map(len, of_trees)), most), bool)
    is_row[:, :, 0] = True  # also where there is no prompt: log p = 0, and not NaN
    of_prompts, in_order = np.zeros(is_row.shape[:2], np.float32), []
    for b, tree in enumerate(of_trees):
        wanted = [at * most + r for at in tree for r in range(most)]
        written = make_group(rows, wanted)
        read_index = dict(zip(written.rows, written.read_index, strict=True))
        in_order.append(replace(written, rows=wanted, read_index=[read_index[row] for row in wanted]))
        for p, at in enumerate(tree):
            is_row[b, p, : len(admitted[at])], of_prompts[b, p] = True, weights[at]
    return Examples(pack_groups(in_order, rows), jnp.asarray(is_row), jnp.asarray(of_prompts))


def draws(
    train: Data, *, minibatch_size: int, text_minibatch: int, by_weight: bool, seed: int
) -> Iterator[tuple[list[Examples], list[Windows]]]:
    """Minibatches of each task, and of the text of each length (`windows_a_step`), without end."""
    of_tasks = [
        _minibatches(
            len(it.weights),
            it.trees_a_step(minibatch_size * train.part(at)),
            seed + at,
            np.asarray(it.weights.sum(axis=1), np.float64) if by_weight else None,
        )
        for at, it in enumerate(train.tasks)
    ]
    counts = windows_a_step([windows.shape[1] for windows in train.texts], text_minibatch)
    of_text = [
        _minibatches(len(windows), count, seed + len(of_tasks) + at)
        for at, (windows, count) in enumerate(zip(train.texts, counts, strict=True))
    ]
    while True:
        tasks = [examples[jnp.asarray(next(at))] for examples, at in zip(train.tasks, of_tasks, strict=True)]
        yield tasks, [Windows(text[jnp.asarray(next(at))]) for text, at in zip(train.texts, of_text, strict=True)]


def windows_a_step(lengths: Sequence[int], text_minibatch: int) -> list[int]:
    """How many windows of each length a step has.

    All together have about as many tokens as `text_minibatch` windows of the longest, each length about as many as the others,
    and one window at least.
    """
    return [max(1, round(text_minibatch * max(lengths) / len(lengths) / length)) for length in lengths]


def spread(minibatch: tuple[list[Examples], list[Windows]], mesh: Mesh) -> tuple[list[Examples], list[Windows]]:
    """A minibatch on a mesh, each shard of the population axis with as many trees, and as many windows.

    Trees that fill it up are copies of the first without weight or answers, and windows such that do not count. On one device
    it stays as it is.
    """
    if mesh.size == 1:
        return put(minibatch, NamedSharding(mesh, BY_POPULATION))

    def filled(count: int) -> tuple[Int[Array, "n"], Bool[Array, "n"]]:
        at = np.arange(-(-count // mesh.shape["population"]) * mesh.shape["population"], dtype=np.int32)
        return jnp.asarray(np.where(at < count, at, 0)), jnp.asarray(at < count)

    tasks, texts = [], []
    for examples in minibatch[0]:
        at, counts = filled(len(examples.weights))
        copied = examples[at]
        batch = replace(copied.batch, is_answer=copied.batch.is_answer & counts[:, None, None])
        tasks.append(Examples(batch, copied.is_row, jnp.where(counts[:, None], copied.weights, 0)))
    for text in minibatch[1]:
        at, counts = filled(len(text.tokens))
        texts.append(Windows(text.tokens[at], counts))
    return put((tasks, texts), NamedSharding(mesh, BY_POPULATION))


def by_length(lengths: Sequence[int], most: int = 4) -> list[list[int]]:
    """Indices of prompts of different lengths in at most `most` groups, of about equal size and of neighbouring lengths.

    Each group is padded to one shape; prompts of one length stay together. In each group they keep their order.
    """
    order = sorted(range(len(lengths)), key=lambda at: lengths[at])
    groups: dict[int, list[int]] = {}
    first: dict[int, int] = {}
    for rank, at in enumerate(order):
        groups.setdefault(first.setdefault(lengths[at], rank) * most // len(order), []).append(at)
    return [sorted(group) for group in groups.values()]


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
