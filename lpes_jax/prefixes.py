"""Pack rows (prompt ids, answer ids) into batches for the model. The shared prefix of a group of rows is computed once.

Shared prefixes are found from the token ids only: questions about one haystack, admitted answers of one prompt, options of one
question, documents before the one that moves, a few-shot header. A group is a token tree: the prefix that all of its rows share
is the root, and the rest are its branches. Rows sorted by their ids are next to the rows with which they share the longest
prefixes; `cheapest_groups` cuts this order by a cost model. Sharing saves tokens, but attention between branches is computed
and masked. If it saves little, every row is a group of its own. `batches` pads groups to a few shapes by the same cost model
and returns the cost, so that callers can choose the cheapest of several groupings.

Letters: B rows or groups, T tokens, A answer tokens, R rows per group, M tokens of a group that predict an answer token.
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
from lpes_jax.models.llama.prefix import Groups, single_prompts

Row = tuple[list[int], list[int]]  # prompt ids, answer ids

_MOST_ROWS, _MOST_TOKENS = 256, 2**16  # per group
_LEAST_GAIN = 0.05  # share of the cost; if sharing saves less, rows are not grouped, which needs fewer kinds of shapes
_STEP = 32  # a root that is cut keeps a multiple of this many tokens
# Widths are rounded up to a multiple of a power of two divided by this. A coarse step lets one program serve several sets of
# prompts; a fine step is used if the 2 % of the tokens that it saves pay for programs of their own.
_COARSE, _FINE, _FINE_SAVES = 16, 64, 0.02
# One more shape of batches must be compiled, so it must save at least this share of all tokens: the first number if the cost of
# compiling is unknown. If that cost is known, it must save the second number and that cost.
_SHAPE, _SHAPE_OF_KNOWN_COST = 0.03, 0.01
# The cost of attention to one key, in units of its multiplications, by a causal kernel and by a masked one. It includes memory
# accesses and exp. The GPU's numbers are for cuDNN's kernels; the second follows from its time (168 TFLOP/s on an H200).
_PAIR = {"cpu": (2.0, 2.0), "gpu": (2.0, 4.0)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Groups of rows; a single prompt is a group of one row. A row is a prompt and its answer, whose last token may be missing.

    Answer token a of row r is predicted at the index `read[read_index[r, a]]` of its group.
    """

    groups: Groups
    read: Int[Array, "B M"]
    read_index: Int[Array, "B R A"]
    answers: Int[Array, "B R A"]
    is_answer: Bool[Array, "B R A"]

    @property
    def tokens(self) -> Int[Array, "B T"]:
        """The tokens of the groups, including padding."""
        return self.groups.tokens


class Costs(NamedTuple):
    """The cost of a token, and of a pair of query and key, in multiplications of one layer."""

    token: float
    causal_pair: float
    masked_pair: float

    @classmethod
    def of(cls, config: LlamaConfig, platform: str) -> "Costs":
        """The costs for a model's sizes, on `cpu` or `gpu`."""
        heads = config.num_heads * config.head_dim
        attention = config.hidden_size * 2 * (heads + config.num_kv_heads * config.head_dim)
        causal, masked = (2 * heads * pair for pair in _PAIR["cpu" if platform == "cpu" else "gpu"])
        return cls(attention + 3 * config.hidden_size * config.intermediate_size, causal, masked)

    def group(self, prefix: Any, branches: Any) -> Any:
        """The cost of a group whose root has `prefix` tokens and whose branches have `branches`; both numbers or arrays."""
        width = prefix + branches
        return self.token * width + self.causal_pair * prefix**2 / 2 + self.masked_pair * branches * width


def round_up(length: int, parts: int = _COARSE) -> int:
    """The padded length of a prompt: a multiple of 32, or of its power of two divided by `parts` if that is more."""
    step = max(32, (1 << (length - 1).bit_length()) // parts)
    return -(-length // step) * step


def _rounded_up(most: int) -> Int[np.ndarray, "W"]:
    """`round_up` of all lengths from 0 to `most`."""
    lengths = np.arange(1, most + 1)
    steps = np.maximum(32, 2 ** np.frexp(lengths - 1)[1] // _COARSE)  # the exponent of a whole number is its bit length
    return np.concatenate([[0], -(-lengths // steps) * steps])


def cheapest_groups(rows: Sequence[Row], costs: Costs, most_tokens: int) -> list[list[int]]:
    """Partition the rows into groups at the least cost.

    Args:
        rows: The rows.
        costs: The cost model.
        most_tokens: The limit of tokens per group, including padding; a group of one row may exceed it.

    Returns:
        The indices of each group's rows, in the order of their ids.
    """
    most_tokens = min(most_tokens, _MOST_TOKENS)
    order, lengths, common = _in_order(rows)
    total = np.concatenate([[0], np.cumsum(lengths - common)])
    padded = _rounded_up(min(most_tokens, int(lengths.sum())) + int(lengths.max()))

    unshared = costs.group(padded[lengths], 0)
    best, begins = np.zeros(len(rows) + 1), np.zeros(len(rows) + 1, int)
    for end in range(1, len(rows) + 1):  # best[end]: least cost of the first `end` rows; begins[end]: start of the last group
        starts = np.arange(end - 1, max(0, end - _MOST_ROWS) - 1, -1)
        prefix = np.minimum.accumulate(np.concatenate([lengths[end - 1 : end], common[starts[:-1]]]))
        branches = lengths[starts] + total[end] - total[starts + 1] - prefix
        fits = (padded[prefix] + padded[np.minimum(branches, len(padded) - 1)] <= most_tokens) & (prefix > 0)
        fits[0] = True  # a group of one row
        costs_here = np.full(len(starts), np.inf)
        costs_here[fits] = best[starts[fits]] + costs.group(padded[prefix[fits]], padded[branches[fits]])
        chosen = int(costs_here.argmin())
        best[end], begins[end] = costs_here[chosen], starts[chosen]
    if best[-1] > (1 - _LEAST_GAIN) * unshared.sum():
        return [[i] for i in order]
    cut, end = [], len(rows)
    while end:
        cut.append(order[begins[end] : end])
        end = begins[end]
    return cut[::-1]


def groups_by_prompt(rows: Sequence[Row]) -> list[list[int]]:
    """One group per prompt, of its admitted answers: the indices of its rows."""
    found: dict[tuple[int, ...], list[int]] = {}
    for i, (ids, _) in enumerate(rows):
        found.setdefault(tuple(ids), []).append(i)
    return list(found.values())


def families(rows: Sequence[Row]) -> list[list[int]]:
    """Partition the rows into families: in the order of their ids, neighbours share at least half of the longer one.

    Returns:
        The indices of each family's rows in ascending order; families are ordered by their first row.
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
class Group:
    """A group of rows as a token tree in depth-first order, without padding.

    Attributes:
        rows: Indices of the rows.
        tokens: Token ids; those below the index `prefix` are the root.
        positions: The position of each token in its rows.
        ends: The token with index j is seen by those with j <= index < ends[j].
        prefix: Tokens of the root.
        read: Indices of the tokens that predict answers.
        read_index: For each row, the indices into `read` that predict its answer.
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
        """The root's tokens rounded down to a multiple of `_STEP`, and the width of the whole group, rounded up."""
        prefix = max(_STEP, self.prefix // _STEP * _STEP)
        return prefix, round_up(max(prefix, len(self.tokens) + max(0, prefix - self.prefix)), parts)


def make_group(rows: Sequence[Row], indices: list[int]) -> Group:
    """The rows with these indices as a group. It lacks their last answer tokens, which predict nothing."""
    indices = sorted(indices, key=lambda i: _read_tokens(rows[i]))
    sequences = [np.array(_read_tokens(rows[i]), np.int32) for i in indices]
    common = [0, *map(_common, sequences, sequences[1:])]
    prefix = min(common[1:], default=len(sequences[0]))
    tokens, positions, paths = [], [], []
    ends = np.zeros(sum(len(sequence) - shared for sequence, shared in zip(sequences, common, strict=True)), np.int32)
    path, written = np.zeros(0, np.int32), 0
    for sequence, shared in zip(sequences, common, strict=True):
        ends[path[shared:]] = written  # no later token sees these
        tokens.append(sequence[shared:])
        positions.append(np.arange(shared, len(sequence)))
        new = np.arange(written, written + len(sequence) - shared)
        path, written = np.concatenate([path[:shared], new]), written + len(new)
        paths.append(path)
    ends[path] = written
    predicting = [
        path[len(rows[i][0]) - 1 : len(rows[i][0]) - 1 + len(rows[i][1])] for path, i in zip(paths, indices, strict=True)
    ]
    read, index = np.unique(np.concatenate(predicting), return_inverse=True)
    read_index = np.split(index, np.cumsum([len(own) for own in predicting])[:-1])
    return Group(indices, np.concatenate(tokens), np.concatenate(positions), ends, prefix, read, read_index)


class Shape(NamedTuple):
    """The shape that groups of a batch are padded to: tokens of the root, of all branches, tokens that are read, and rows.

    A root may have more tokens than `prefix`: the rest of it precedes the branches, and all of them see it.
    """

    prefix: int
    branches: int
    read: int
    rows: int

    @classmethod
    def of(cls, groups: Sequence[Group], *, cut: bool = False, parts: int = _COARSE) -> "Shape":
        """The shape with roots padded to the longest, or cut to the shortest; `parts` as in `round_up`."""
        if cut:
            prefixes, widths = zip(*(group.cut(parts) for group in groups), strict=True)
            prefix, branches = min(prefixes), max(widths) - min(prefixes)
        else:
            prefix, branches = (max(widths) for widths in zip(*(group.padded(parts) for group in groups), strict=True))
        rows, read = max(len(group.rows) for group in groups), max(len(group.read) for group in groups)
        return cls(prefix, branches, read if rows == 1 else -(-read // 8) * 8, rows)


def pack_groups(
    groups: Sequence[Group], rows: Sequence[Row], answer_length: int | None = None, shape: Shape | None = None
) -> Batch:
    """Pack groups into a batch. Row r of group b is its rows[r]; other rows are padding.

    Args:
        groups: The groups.
        rows: The rows of all groups.
        answer_length: A of the batch; None means that of the longest answer.
        shape: The shape to pad to; None means `Shape.of(groups)`.
    """
    prefix, branches, num_read, num_rows = shape or Shape.of(groups)
    size, width = len(groups), prefix + branches
    longest = answer_length or max(len(rows[i][1]) for group in groups for i in group.rows)
    tokens, positions = np.zeros((2, size, width), np.int32)
    ends = np.full((size, width), width, np.int32)
    ends[:, :prefix] = prefix  # no branch sees the padding of the root; all padding sees some token, or it would be NaN
    read = np.zeros((size, num_read), np.int32)
    read_index, answers = np.zeros((2, size, num_rows, longest), np.int32)
    is_answer = np.zeros((size, num_rows, longest), bool)
    for b, group in enumerate(groups):
        indices, gap = np.arange(len(group.tokens)), max(0, prefix - group.prefix)
        indices[group.prefix :] += gap
        tokens[b, indices], positions[b, indices] = group.tokens, group.positions
        ends[b, : group.prefix] = width
        ends[b, indices[group.prefix :]] = group.ends[group.prefix :] + gap
        read[b, : len(group.read)] = indices[group.read]
        for r, i in enumerate(group.rows):
            answer = rows[i][1]
            part = b, r, slice(len(answer))
            read_index[part], answers[part], is_answer[part] = group.read_index[r], answer, True
    on_device = Groups(jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(ends), prefix)
    return Batch(on_device, *(jnp.asarray(array) for array in (read, read_index, answers, is_answer)))


def batches(
    groups: Sequence[Group],
    room: int,
    costs: Costs,
    shards: int = 1,
    most_groups: int | None = None,
    shape_cost: int = 0,
) -> tuple[float, list[tuple[Shape, list[list[Group]]]]]:
    """Batch groups of similar shape together, at the least cost.

    Shapes are chosen from the data. There are few, because each one is a program to compile. All batches of a shape have the
    same number of groups; the last one is filled with groups without rows.

    Args:
        groups: The groups.
        room: Tokens of a batch per shard; a shard has at least one group.
        costs: The cost model.
        shards: The number of shards of a batch.
        most_groups: The limit of groups per shard; None means no limit.
        shape_cost: Tokens that one more shape must save, and at least 1 % of all; 0 means unknown: it must save 3 % of all.

    Returns:
        The cost of batches and shapes, in tokens without attention (`Costs.token`), and the shapes, each with its batches.
    """
    if not groups:
        return 0.0, []
    size_of = partial(_batch_size, room=room, shards=shards, most_groups=most_groups)
    written = sum(float(costs.group(group.prefix, len(group.tokens) - group.prefix)) for group in groups) / costs.token
    extra = max(_SHAPE_OF_KNOWN_COST * written, float(shape_cost)) if shape_cost else _SHAPE * written
    parts = _FINE if 0 < shape_cost < _FINE_SAVES * written else _COARSE
    candidates: list[tuple[float, list[tuple[Shape, list[Group]]]]] = []
    kinds = [kind for shared in (False, True) if (kind := [group for group in groups if (len(group.rows) > 1) == shared])]
    for split in (kinds, [list(groups)])[: len(kinds)]:  # with one kind, both are equal
        cut = [
            min((_by_shape(order, size_of, costs, extra, parts) for order in _orders(kind)), key=lambda cut: cut[0])
            for kind in split
        ]
        candidates.append((sum(cost for cost, _ in cut), [shaped for _, shapes in cut for shaped in shapes]))
    cost, by_shape = min(candidates, key=lambda candidate: candidate[0])
    found = []
    for shape, members in by_shape:
        size = int(size_of(len(members), shape.prefix + shape.branches))
        filled = members + [replace(members[0], rows=[], read_index=[])] * (-len(members) % size)
        found.append((shape, [filled[start : start + size] for start in range(0, len(filled), size)]))
    return cost, found


def _orders(groups: Sequence[Group]) -> list[list[Group]]:
    """The groups sorted by root, by branches, and by all tokens; neighbours may have a common shape."""
    by_root, by_branches = (sorted(groups, key=lambda group: group.shape[::step]) for step in (1, -1))
    return [by_root, by_branches, sorted(groups, key=lambda group: (len(group.tokens), group.prefix))]


def _by_shape(
    ordered: Sequence[Group], size_of: Callable[[Any, Any], Any], costs: Costs, extra: float, parts: int
) -> tuple[float, list[tuple[Shape, list[Group]]]]:
    """The least cost of cutting the groups, in this order, into parts of one shape each; and these parts."""
    kinds = np.array([(*group.padded(parts), *group.cut(parts)) for group in ordered])
    ends = np.append(np.flatnonzero((kinds[1:] != kinds[:-1]).any(axis=1)) + 1, len(ordered))  # ends of runs of equal groups
    starts, kinds = np.append(0, ends[:-1]), kinds[ends - 1]
    best, begins, is_cut = np.zeros(len(ends) + 1), np.zeros(len(ends) + 1, int), np.zeros(len(ends) + 1, bool)
    for end in range(1, len(ends) + 1):
        reversed_kinds = kinds[:end][::-1]  # its cumulative maximum (or minimum) covers the kinds from each start to this end
        root, branches, _, width = np.maximum.accumulate(reversed_kinds, axis=0)[::-1].T
        prefix = np.minimum.accumulate(reversed_kinds[:, 2])[::-1]
        count = ends[end - 1] - starts[:end]
        padded_and_cut = []
        for shape in ((root, branches), (prefix, width - prefix)):
            size = size_of(count, sum(shape))
            padded_and_cut.append(best[:end] + -(-count // size) * size * costs.group(*shape) / costs.token + extra)
        least = np.minimum(*padded_and_cut)
        begins[end] = least.argmin()
        best[end], is_cut[end] = least[begins[end]], padded_and_cut[1][begins[end]] < padded_and_cut[0][begins[end]]
    by_shape, end = [], len(ends)
    while end:
        members = list(ordered[int(starts[begins[end]]) : int(ends[end - 1])])
        by_shape.append((Shape.of(members, cut=bool(is_cut[end]), parts=parts), members))
        end = begins[end]
    return float(best[-1]), by_shape[::-1]


def _batch_size(count: Any, width: Any, room: int, shards: int, most_groups: int | None) -> Any:
    """Groups per batch if as few batches as possible contain `count` of a width (numbers or arrays); divisible by `shards`."""
    most = np.maximum(1, room // width)
    most = shards * (most if most_groups is None else np.minimum(most, most_groups))
    size = -(-count // -(-count // most))
    return -(-size // shards) * shards


def pack_rows(rows: Sequence[Row], answer_length: int | None = None, longest: int = 0) -> Batch:
    """Pack each row as a group of its own, with its whole answer; padded to the longest row, or to `longest` tokens if more."""
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
    """The order of the rows by their ids and, in that order, their lengths and the tokens shared with the previous row."""
    sequences = [np.array(_read_tokens(row), np.int32) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: sequences[i].tolist())
    ordered = [sequences[i] for i in order]
    return order, np.array([len(sequence) for sequence in ordered]), np.array([0, *map(_common, ordered, ordered[1:])])


def _read_tokens(row: Row) -> list[int]:
    ids, answer = row
    return (ids + answer)[:-1]


def _common(one: Int[np.ndarray, "m"], other: Int[np.ndarray, "n"]) -> int:
    """The number of tokens that both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
