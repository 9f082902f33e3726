"""Rows (prompt ids, answer ids) as batches for the model; rows that begin alike as trees, so that what they share is read once.

Which rows share is found from their token ids alone: queries of one haystack, admitted answers of one prompt, options of one
question, documents up to the one that moves, a few-shot header. Rows in the order of their ids stand beside those that they
share most with; `groups` cuts this order where a model of the cost says so. Sharing saves tokens, and costs attention between
branches that is computed and masked away; where it gains little, all rows stay alone. `batches` pads trees to few shapes by the
same model and says what that costs, so that the cheapest of several groupings can be taken.

Letters: B rows or trees, T tokens, A answer tokens, R rows of a tree, M tokens of a tree that predict an answer token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.prefix import Trees, single_prompts

Row = tuple[list[int], list[int]]  # prompt ids, answer ids

_MOST_ROWS, _MOST_TOKENS = 256, 2**16  # of a tree
_LEAST_GAIN = 0.05  # of the cost, below which rows stay alone: one kind of shape less
_STEP = 32  # a root that is cut keeps a multiple of so many tokens
# Parts of a power of two that widths are rounded up to: few of them, that one program may serve several sets of prompts; more
# where the 2 % of the tokens that they save pay for programs of their own.
_COARSE, _FINE, _FINE_SAVES = 16, 64, 0.02
# Of all tokens, what one more shape of batches must save at least, as it is compiled: where that is all that is known, and
# beside what it costs to compile.
_SHAPE, _SHAPE_OF_KNOWN_COST = 0.03, 0.01
# Attention to one key in units of its multiplications, by a causal kernel and by a mask: the rest of it is memory and exp. On a
# GPU both are of cuDNN's kernels, the second from its time alone (168 TFLOP/s on an H200).
_PAIR = {"cpu": (2.0, 2.0), "gpu": (2.0, 4.0)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Trees of rows; a single prompt is a tree of one row. The answer stands behind the prompt, its last token may be left out.

    Answer token a of row r is predicted at the index `read[read_index[r, a]]` of its tree.
    """

    trees: Trees
    read: Int[Array, "B M"]
    read_index: Int[Array, "B R A"]
    answers: Int[Array, "B R A"]
    is_answer: Bool[Array, "B R A"]

    @property
    def tokens(self) -> Int[Array, "B T"]:
        """Of the trees, padding included."""
        return self.trees.tokens


class Costs(NamedTuple):
    """What a token costs, and a query that meets a key, in multiplications of one layer."""

    token: float
    causal_pair: float
    masked_pair: float

    @classmethod
    def of(cls, config: LlamaConfig, platform: str) -> "Costs":
        heads = config.num_heads * config.head_dim
        attention = config.hidden_size * 2 * (heads + config.num_kv_heads * config.head_dim)
        causal, masked = (2 * heads * pair for pair in _PAIR["cpu" if platform == "cpu" else "gpu"])
        return cls(attention + 3 * config.hidden_size * config.intermediate_size, causal, masked)

    def tree(self, prefix: Any, branches: Any) -> Any:
        """Of a tree with a root and branches of so many tokens, numbers or arrays."""
        width = prefix + branches
        return self.token * width + self.causal_pair * prefix**2 / 2 + self.masked_pair * branches * width


def round_up(length: int, parts: int = _COARSE) -> int:
    """The padded length of a prompt: up to the next 32, or sixteenth of its power of two: few shapes, little waste."""
    step = max(32, (1 << (length - 1).bit_length()) // parts)
    return -(-length // step) * step


def groups(rows: Sequence[Row], costs: Costs, most_tokens: int) -> list[list[int]]:
    """The rows of each tree, in the order of their ids, at the least cost.

    A tree has at most `most_tokens`, padding included, unless it is one row.
    """
    most_tokens = min(most_tokens, _MOST_TOKENS)
    order, lengths, common = _in_order(rows)
    total = np.concatenate([[0], np.cumsum(lengths - common)])
    padded = np.array([0, *map(round_up, range(1, min(most_tokens, int(lengths.sum())) + int(lengths.max()) + 1))])

    unshared = costs.tree(padded[lengths], 0)
    best, begins = np.zeros(len(rows) + 1), np.zeros(len(rows) + 1, int)
    for end in range(1, len(rows) + 1):  # the best cut of the rows before `end`, whose last tree begins at `begins[end]`
        starts = np.arange(end - 1, max(0, end - _MOST_ROWS) - 1, -1)
        prefix = np.minimum.accumulate(np.concatenate([lengths[end - 1 : end], common[starts[:-1]]]))
        branches = lengths[starts] + total[end] - total[starts + 1] - prefix
        fits = (padded[prefix] + padded[np.minimum(branches, len(padded) - 1)] <= most_tokens) & (prefix > 0)
        fits[0] = True  # one row alone
        costs_here = np.full(len(starts), np.inf)
        costs_here[fits] = best[starts[fits]] + costs.tree(padded[prefix[fits]], padded[branches[fits]])
        chosen = int(costs_here.argmin())
        best[end], begins[end] = costs_here[chosen], starts[chosen]
    if best[-1] > (1 - _LEAST_GAIN) * unshared.sum():
        return [[i] for i in order]
    cut, end = [], len(rows)
    while end:
        cut.append(order[begins[end] : end])
        end = begins[end]
    return cut[::-1]


def of_one_prompt(rows: Sequence[Row]) -> list[list[int]]:
    """The rows of each prompt: its admitted answers."""
    found: dict[tuple[int, ...], list[int]] = {}
    for i, (ids, _) in enumerate(rows):
        found.setdefault(tuple(ids), []).append(i)
    return list(found.values())


def families(rows: Sequence[Row]) -> list[list[int]]:
    """Rows that are alike for the most part: a family is cut where rows in the order of their ids share less than half.

    Each in the order given, and so are the families, by their first rows.
    """
    order, lengths, common = _in_order(rows)
    found: list[list[int]] = []
    for rank, i in enumerate(order):
        if rank and 2 * common[rank] >= max(lengths[rank - 1], lengths[rank]):
            found[-1].append(i)
        else:
            found.append([i])
    return sorted(map(sorted, found))


@dataclass(frozen=True)
class Tree:
    """One tree as written, without padding: indices below `prefix` are the root's.

    `read` are the indices of the tokens that predict answers; `read_index`, for each of `rows`, which of these predict its own.
    """

    rows: list[int]
    tokens: Int[np.ndarray, "T"]
    positions: Int[np.ndarray, "T"]
    ends: Int[np.ndarray, "T"]
    prefix: int
    read: Int[np.ndarray, "M"]
    read_index: list[np.ndarray]

    @property
    def shape(self) -> tuple[int, int]:
        """Padded widths of the root and of all branches."""
        return self.padded()

    def padded(self, parts: int = _COARSE) -> tuple[int, int]:
        """Widths of the root and of all branches, rounded up."""
        branches = len(self.tokens) - self.prefix
        return round_up(self.prefix, parts), round_up(branches, parts) if branches else 0

    def cut(self, parts: int = _COARSE) -> tuple[int, int]:
        """Tokens of the root that a multiple of `_STEP` keeps, and the width of the whole tree, rounded up."""
        prefix = max(_STEP, self.prefix // _STEP * _STEP)
        return prefix, round_up(max(prefix, len(self.tokens) + max(0, prefix - self.prefix)), parts)


def tree_of(rows: Sequence[Row], group: list[int]) -> Tree:
    """The rows of a group as a tree. Their last answer token predicts nothing, and is not in it."""
    group = sorted(group, key=lambda i: _read_tokens(rows[i]))
    sequences = [np.array(_read_tokens(rows[i]), np.int32) for i in group]
    common = [0, *map(_common, sequences, sequences[1:])]
    prefix = min(common[1:], default=len(sequences[0]))
    tokens, positions, paths = [], [], []
    ends = np.zeros(sum(len(sequence) - shared for sequence, shared in zip(sequences, common, strict=True)), np.int32)
    path, written = np.zeros(0, np.int32), 0
    for sequence, shared in zip(sequences, common, strict=True):
        ends[path[shared:]] = written  # these are done: what comes now stands beside them
        tokens.append(sequence[shared:])
        positions.append(np.arange(shared, len(sequence)))
        new = np.arange(written, written + len(sequence) - shared)
        path, written = np.concatenate([path[:shared], new]), written + len(new)
        paths.append(path)
    ends[path] = written
    predicting = [
        path[len(rows[i][0]) - 1 : len(rows[i][0]) - 1 + len(rows[i][1])] for path, i in zip(paths, group, strict=True)
    ]
    read, index = np.unique(np.concatenate(predicting), return_inverse=True)
    read_index = np.split(index, np.cumsum([len(indices) for indices in predicting])[:-1])
    return Tree(group, np.concatenate(tokens), np.concatenate(positions), ends, prefix, read, read_index)


class Shape(NamedTuple):
    """What trees of a batch are padded to: tokens of the root and of all branches, tokens that are read, rows.

    A root may have more tokens than `prefix`: the rest of it stands before the branches, and is seen by all of them.
    """

    prefix: int
    branches: int
    read: int
    rows: int

    @classmethod
    def of(cls, trees: Sequence[Tree], *, cut: bool = False, parts: int = _COARSE) -> "Shape":
        """Every root padded to the longest, or cut to the shortest; widths rounded up to `parts` of their power of two."""
        if cut:
            prefixes, widths = zip(*(tree.cut(parts) for tree in trees), strict=True)
            prefix, branches = min(prefixes), max(widths) - min(prefixes)
        else:
            prefix, branches = (max(widths) for widths in zip(*(tree.padded(parts) for tree in trees), strict=True))
        rows, read = max(len(tree.rows) for tree in trees), max(len(tree.read) for tree in trees)
        return cls(prefix, branches, read if rows == 1 else -(-read // 8) * 8, rows)


def pack_trees(
    trees: Sequence[Tree], rows: Sequence[Row], answer_length: int | None = None, shape: Shape | None = None
) -> Batch:
    """Trees as one batch, padded to `shape` (None: the largest); row r of tree b is its rows[r], the rest padding."""
    prefix, branches, num_read, num_rows = shape or Shape.of(trees)
    size, width = len(trees), prefix + branches
    longest = answer_length or max(len(rows[i][1]) for tree in trees for i in tree.rows)
    tokens, positions = np.zeros((2, size, width), np.int32)
    ends = np.full((size, width), width, np.int32)
    ends[:, :prefix] = prefix  # padding of the root is seen by none of the branches; all padding sees something, or is NaN
    read = np.zeros((size, num_read), np.int32)
    read_index, answers = np.zeros((2, size, num_rows, longest), np.int32)
    is_answer = np.zeros((size, num_rows, longest), bool)
    for b, tree in enumerate(trees):
        where, gap = np.arange(len(tree.tokens)), max(0, prefix - tree.prefix)
        where[tree.prefix :] += gap
        tokens[b, where], positions[b, where] = tree.tokens, tree.positions
        ends[b, : tree.prefix] = width
        ends[b, where[tree.prefix :]] = tree.ends[tree.prefix :] + gap
        read[b, : len(tree.read)] = where[tree.read]
        for r, i in enumerate(tree.rows):
            answer = rows[i][1]
            part = b, r, slice(len(answer))
            read_index[part], answers[part], is_answer[part] = tree.read_index[r], answer, True
    on_device = Trees(jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(ends), prefix)
    return Batch(on_device, *(jnp.asarray(array) for array in (read, read_index, answers, is_answer)))


def batches(
    trees: Sequence[Tree],
    room: int,
    costs: Costs,
    shards: int = 1,
    most_trees: int | None = None,
    shape_cost: int = 0,
) -> tuple[float, list[tuple[Shape, list[list[Tree]]]]]:
    """Trees of about the same shape together: the shapes that they are padded to, each with its batches, and what that costs.

    A batch has as many trees for each of so many shards as `room` tokens hold, and no more than `most_trees`; or one. Shapes
    are chosen from the data: few, for each is a program to compile; one more where it saves `shape_cost` tokens and 1 % of all,
    or 3 % where that cost is 0, not known. Batches of a shape have as many trees: the last is filled with trees that have no
    rows. The cost is in tokens that meet no other (`Costs`).
    """
    if not trees:
        return 0.0, []
    size_of = partial(_batch_size, room=room, shards=shards, most_trees=most_trees)
    written = sum(float(costs.tree(tree.prefix, len(tree.tokens) - tree.prefix)) for tree in trees) / costs.token
    extra = max(_SHAPE_OF_KNOWN_COST * written, float(shape_cost)) if shape_cost else _SHAPE * written
    parts = _FINE if 0 < shape_cost < _FINE_SAVES * written else _COARSE
    ways: list[tuple[float, list[tuple[Shape, list[Tree]]]]] = []
    kinds = [kind for shared in (False, True) if (kind := [tree for tree in trees if (len(tree.rows) > 1) == shared])]
    for split in (kinds, [list(trees)])[: len(kinds)]:  # the second is the first where there is one kind
        cut = [
            min((_by_shape(order, size_of, costs, extra, parts) for order in _orders(kind)), key=lambda cut: cut[0])
            for kind in split
        ]
        ways.append((sum(cost for cost, _ in cut), [group for _, of_kind in cut for group in of_kind]))
    cost, groups = min(ways, key=lambda way: way[0])
    found = []
    for shape, group in groups:
        size = int(size_of(len(group), shape.prefix + shape.branches))
        filled = group + [replace(group[0], rows=[], read_index=[])] * (-len(group) % size)
        found.append((shape, [filled[start : start + size] for start in range(0, len(filled), size)]))
    return cost, found


def _orders(trees: Sequence[Tree]) -> list[list[Tree]]:
    """By root, by branches, and by all tokens: what stands side by side may have a shape in common."""
    by_root, by_branches = (sorted(trees, key=lambda tree: tree.shape[::way]) for way in (1, -1))
    return [by_root, by_branches, sorted(trees, key=lambda tree: (len(tree.tokens), tree.prefix))]


def _by_shape(
    ordered: Sequence[Tree], size_of: Callable[[Any, Any], Any], costs: Costs, extra: float, parts: int
) -> tuple[float, list[tuple[Shape, list[Tree]]]]:
    """The cut of the trees in this order into groups that have a shape each, at the least cost, and that."""
    kinds = np.array([(*tree.padded(parts), *tree.cut(parts)) for tree in ordered])
    ends = np.append(np.flatnonzero((kinds[1:] != kinds[:-1]).any(axis=1)) + 1, len(ordered))  # of trees that are alike
    starts, kinds = np.append(0, ends[:-1]), kinds[ends - 1]
    best, begins, is_cut = np.zeros(len(ends) + 1), np.zeros(len(ends) + 1, int), np.zeros(len(ends) + 1, bool)
    for end in range(1, len(ends) + 1):
        back = kinds[:end][::-1]  # widest, or narrowest, of the kinds from each start to this end
        root, branches, _, width = np.maximum.accumulate(back, axis=0)[::-1].T
        prefix = np.minimum.accumulate(back[:, 2])[::-1]
        count = ends[end - 1] - starts[:end]
        both = []
        for shape in ((root, branches), (prefix, width - prefix)):
            size = size_of(count, sum(shape))
            both.append(best[:end] + -(-count // size) * size * costs.tree(*shape) / costs.token + extra)
        least = np.minimum(*both)
        begins[end] = least.argmin()
        best[end], is_cut[end] = least[begins[end]], both[1][begins[end]] < both[0][begins[end]]
    groups, end = [], len(ends)
    while end:
        group = list(ordered[int(starts[begins[end]]) : int(ends[end - 1])])
        groups.append((Shape.of(group, cut=bool(is_cut[end]), parts=parts), group))
        end = begins[end]
    return float(best[-1]), groups[::-1]


def _batch_size(count: Any, width: Any, room: int, shards: int, most_trees: int | None) -> Any:
    """Trees of each of as few batches as hold `count` of a width, numbers or arrays; a multiple of the shards."""
    most = np.maximum(1, room // width)
    most = shards * (most if most_trees is None else np.minimum(most, most_trees))
    size = -(-count // -(-count // most))
    return -(-size // shards) * shards


def pack_rows(rows: Sequence[Row], answer_length: int | None = None, longest: int = 0) -> Batch:
    """Each row a tree of its own, with all of its answer; padded to the longest, or to hold one of `longest` tokens."""
    answer_length = answer_length or max(len(answer) for _, answer in rows)
    length = round_up(max(longest, *(len(ids) + len(answer) for ids, answer in rows)))
    tokens, _ = padded([ids + answer for ids, answer in rows], length)
    answers, answer_lengths = padded([answer for _, answer in rows], answer_length)
    number = np.arange(answer_length, dtype=np.int32)
    first = np.array([[len(ids) - 1] for ids, _ in rows], np.int32)
    index, is_answer = np.broadcast_to(number, answers.shape), number < answer_lengths[:, None]
    return Batch(
        single_prompts(jnp.asarray(tokens)),
        jnp.asarray(np.minimum(first + number, length - 1)),
        *(jnp.asarray(array[:, None]) for array in (index, answers, is_answer)),
    )


def padded(sequences: Sequence[Sequence[int]], length: int) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Token ids padded on the right with 0, and their lengths."""
    tokens = np.zeros((len(sequences), length), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    return tokens, np.array([len(sequence) for sequence in sequences], np.int32)


def _in_order(rows: Sequence[Row]) -> tuple[list[int], Int[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """The order of the rows by their ids; in it, their lengths, and how many tokens each has in common with the one before."""
    sequences = [np.array(_read_tokens(row), np.int32) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: sequences[i].tolist())
    ordered = [sequences[i] for i in order]
    return order, np.array([len(sequence) for sequence in ordered]), np.array([0, *map(_common, ordered, ordered[1:])])


def _read_tokens(row: Row) -> list[int]:
    ids, answer = row
    return (ids + answer)[:-1]


def _common(one: Int[np.ndarray, "m"], other: Int[np.ndarray, "n"]) -> int:
    """Tokens that both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
