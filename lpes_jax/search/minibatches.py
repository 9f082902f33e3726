"""The training data of a gradient descent: prompts in groups, windows of plain text, and minibatches of both.

A group contains prompts with one shared prefix, such as several questions about the same pairs (`shared_groups`). A step takes
whole groups, with about `minibatch_size` prompts in total. Groups do not change the loss of a prompt, but which prompts are in
the same step.

Large groups are cheap, but noisy. Let g be the haystack's share of the variance of a prompt's gradient. A step of k groups of m
prompts has a variance of (g + (1 - g) / m) / k, and computes k shared prefixes and k m ends (the tokens after the prefix). With
g = 0.1 (measured with the bundled model: 0.00 ± 0.07) and ends of 5 % of a prompt, 5 groups of 5 have 1.3 times the variance of
24 prompts with 24 haystacks, at a quarter of the cost; 2 groups of 12 have 2.1 times the variance, at an eighth. The variance
also limits the learning rate. So a group has at most a quarter of a minibatch: a step has at least four groups (two, for
minibatches below 16).

The prompts of a question follow each other in a group, so a group has all positions about equally often. Each prompt is its own
group if grouping would not halve the cost (for example if each question has its own pairs), or if prompts are drawn by weight.

Each of several devices has a part of a minibatch, padded with groups and windows of weight 0: see `spread`.

Letters: N prompts, B groups, P prompts per group, R rows per prompt (its admitted answers), W windows of text, T tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    """Prompts of one task in groups, R rows per prompt; `is_row` marks those with an answer, others are padding.

    A group with fewer than P prompts is padded with prompts of weight 0 and log p = 0.
    """

    batch: Batch
    is_row: Bool[Array, "B P R"]
    weights: Float[Array, "B P"]

    @property
    def is_prompt(self) -> Bool[Array, "B P"]:
        return self.batch.is_answer.any(axis=2).reshape(self.is_row.shape).any(axis=2)

    def groups_per_step(self, minibatch_size: int | float) -> int:
        """The number of groups that have about `minibatch_size` prompts: at least one, at most all."""
        num_groups = len(self.weights)
        return min(num_groups, max(1, round(minibatch_size * num_groups / int(self.is_prompt.sum()))))

    def __getitem__(self, indices: Int[Array, "n"]) -> "Examples":
        return _at(self, indices)


@jax.jit
def _at(arrays: Any, indices: Int[Array, "n"]) -> Any:
    """The rows of all arrays, by one program."""
    return jax.tree.map(lambda leaf: leaf[indices], arrays)


class Share(NamedTuple):
    """The share of some examples in the loss: the index of their task, their share of its prompts, and the task's weight."""

    task: int
    part: float
    weight: float

    @property
    def coefficient(self) -> float:
        """The coefficient of the examples' loss (nats per prompt) in the objective."""
        return self.weight * self.part


@dataclass(frozen=True)
class Data:
    """Training or held-back data: prompts of each task, and windows of plain text (None: no text).

    `shares` gives the task and the weight of each entry of `tasks`, since a task may have several entries (one per shape).
    With None each entry is a task, and all have equal weights. Text of several lengths is a list, the longest last.
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

    def part(self, index: int) -> float:
        """The part of its task's minibatch that entry `index` of `tasks` has."""
        return 1.0 if self.shares is None else self.shares[index].part


class Windows(NamedTuple):
    """Plain text of a minibatch. `counts` is False for windows that are padding; None: no window is."""

    tokens: Int[Array, "W T"]
    counts: Bool[Array, "W"] | None = None


def sizes(train: Data, held_back: Data, minibatch_size: int) -> dict[str, float]:
    """For the record: prompts (a mean) and groups per step, and held-back prompts, of all tasks together."""
    groups = [examples.groups_per_step(minibatch_size * train.part(index)) for index, examples in enumerate(train.tasks)]
    prompts = [
        count * int(examples.is_prompt.sum()) / len(examples.weights)
        for count, examples in zip(groups, train.tasks, strict=True)
    ]
    held = sum(int(examples.is_prompt.sum()) for examples in held_back.tasks)
    return {"prompts_a_step": sum(prompts), "trees_a_step": sum(groups), "prompts_a_look": held}


def shared_groups(prompts: Sequence[EncodedPrompt], config: LlamaConfig, most: int) -> list[list[int]]:
    """The indices of the prompts of each group, in order: at most `most` with one shared prefix, in groups of similar size.

    Each prompt is its own group unless groups, all padded to the largest, cost at most half as much.
    """
    rows = [(prompt.ids, prompt.answers[0]) for prompt in prompts]
    cut = [part.tolist() for family in families(rows) for part in np.array_split(family, math.ceil(len(family) / max(1, most)))]
    single = [[index] for index in range(len(rows))]

    def cost(groups: list[list[int]]) -> float:
        prefix, branches = (
            max(widths) for widths in zip(*(make_group(rows, members).shape for members in groups), strict=True)
        )
        return len(groups) * Costs.of(config, jax.default_backend()).group(prefix, branches)

    return cut if len(cut) < len(single) and cost(cut) <= cost(single) / 2 else single


def prompts_per_group(minibatch_size: int) -> int:
    """The most prompts per group: see the top of this file."""
    return max(minibatch_size // 4, min(minibatch_size // 2, 4))


def pack(
    prompts: Sequence[EncodedPrompt],
    weights: Sequence[float],
    groups: Sequence[Sequence[int]] | None = None,
    *,
    most_answers: int = 2,
) -> Examples:
    """Groups, padded to one shape.

    Every prompt has as many rows as the prompt with the most answers, but at most `most_answers`: otherwise one question with
    thirteen admitted answers (in lost-in-the-middle's file) would raise the cost of all others. The first answers are the most
    common ones.

    Args:
        prompts: All prompts.
        weights: The weight of each prompt.
        groups: The indices of the prompts of each group. None: each prompt is its own group.
        most_answers: The most rows per prompt.

    Returns:
        The groups, in the order of `groups`.
    """
    admitted = [prompt.answers[:most_answers] for prompt in prompts]
    most = max(map(len, admitted))
    rows = [
        (prompt.ids, answer)
        for prompt, answers in zip(prompts, admitted, strict=True)
        for answer in answers + [answers[0]] * (most - len(answers))
    ]
    members = [[index] for index in range(len(prompts))] if groups is None else groups
    is_row = np.zeros((len(members), max(map(len, members)), most), bool)
    is_row[:, :, 0] = True  # padding, too: its log p is 0, and not NaN
    prompt_weights, packed = np.zeros(is_row.shape[:2], np.float32), []
    for b, indices in enumerate(members):
        wanted = [index * most + r for index in indices for r in range(most)]
        written = make_group(rows, wanted)
        read_index = dict(zip(written.rows, written.read_index, strict=True))
        packed.append(replace(written, rows=wanted, read_index=[read_index[row] for row in wanted]))
        for p, index in enumerate(indices):
            is_row[b, p, : len(admitted[index])], prompt_weights[b, p] = True, weights[index]
    return Examples(pack_groups(packed, rows), jnp.asarray(is_row), jnp.asarray(prompt_weights))


def draws(
    train: Data, *, minibatch_size: int, text_minibatch: int, by_weight: bool, seed: int
) -> Iterator[tuple[list[Examples], list[Windows]]]:
    """Endless minibatches of each task, and of the text of each length (`windows_per_step`)."""
    task_draws = [
        _minibatches(
            len(examples.weights),
            examples.groups_per_step(minibatch_size * train.part(index)),
            seed + index,
            np.asarray(examples.weights.sum(axis=1), np.float64) if by_weight else None,
        )
        for index, examples in enumerate(train.tasks)
    ]
    counts = windows_per_step([windows.shape[1] for windows in train.texts], text_minibatch)
    text_draws = [
        _minibatches(len(windows), count, seed + len(task_draws) + index)
        for index, (windows, count) in enumerate(zip(train.texts, counts, strict=True))
    ]
    while True:
        tasks = [examples[jnp.asarray(next(indices))] for examples, indices in zip(train.tasks, task_draws, strict=True)]
        yield (
            tasks,
            [Windows(_at(text, jnp.asarray(next(indices)))) for text, indices in zip(train.texts, text_draws, strict=True)],
        )


def windows_per_step(lengths: Sequence[int], text_minibatch: int) -> list[int]:
    """The number of windows of each length per step.

    All together have about as many tokens as `text_minibatch` windows of the longest. Each length has about equally many
    tokens, and at least one window.
    """
    return [max(1, round(text_minibatch * max(lengths) / len(lengths) / length)) for length in lengths]


def spread(minibatch: tuple[list[Examples], list[Windows]], mesh: Mesh) -> tuple[list[Examples], list[Windows]]:
    """Put a minibatch on a mesh. All shards of the population axis get equally many groups, and equally many windows.

    Padding is copies of the first group, without weight or answers, and of the first window, which do not count. On one device
    nothing is padded.
    """
    if mesh.size == 1:
        return put(minibatch, NamedSharding(mesh, BY_POPULATION))

    def filled(count: int) -> tuple[Int[Array, "n"], Bool[Array, "n"]]:
        indices = np.arange(-(-count // mesh.shape["population"]) * mesh.shape["population"], dtype=np.int32)
        return jnp.asarray(np.where(indices < count, indices, 0)), jnp.asarray(indices < count)

    tasks, texts = [], []
    for examples in minibatch[0]:
        indices, counts = filled(len(examples.weights))
        copied = examples[indices]
        batch = replace(copied.batch, is_answer=copied.batch.is_answer & counts[:, None, None])
        tasks.append(Examples(batch, copied.is_row, jnp.where(counts[:, None], copied.weights, 0)))
    for text in minibatch[1]:
        indices, counts = filled(len(text.tokens))
        texts.append(Windows(text.tokens[indices], counts))
    return put((tasks, texts), NamedSharding(mesh, BY_POPULATION))


def by_length(lengths: Sequence[int], most: int = 4) -> list[list[int]]:
    """Indices of prompts of different lengths, in at most `most` groups of about equal size and neighbouring lengths.

    Each group is to be padded to one shape. Prompts of one length are in one group. Groups keep the order of the prompts.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    groups: dict[int, list[int]] = {}
    first: dict[int, int] = {}
    for rank, index in enumerate(order):
        groups.setdefault(first.setdefault(lengths[index], rank) * most // len(order), []).append(index)
    return [sorted(group) for group in groups.values()]


def _minibatches(
    count: int, size: int, seed: int, weights: Float[np.ndarray, "count"] | None = None
) -> Iterator[Int[np.ndarray, "size"]]:
    """Endless indices of minibatches: drawn by weight, or in epochs.

    Each epoch is a new permutation. Fewer than `size` remaining indices come first in the next epoch.
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
