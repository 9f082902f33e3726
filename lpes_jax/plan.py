"""The passes of a scorer over its rows: which rows, in which shapes, and what that costs. Pure: no model, no device.

    trees = group_rows(rows, budget, costs)          rows that begin alike, together (`lpes_jax.prefixes`)
    plan = make_plan(rows, trees, budget, costs)     trees of about the same shape, in batches that a device takes
    budget = smaller(budget, plan, longest)          where a pass of the plan ran out of memory after all

`lpes_jax.scoring` runs a plan: it puts the batches on devices and collects the scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from lpes_jax.memory import PassMemory
from lpes_jax.prefixes import Costs, Row, Shape, Tree, batches, groups, of_one_prompt, round_up, tree_of


@dataclass(frozen=True)
class Budget:
    """What a device takes at once.

    `tokens_that_fit`: of one tree at most, padding included. `tokens_at_once`: of a batch, for one individual. `memory`: bytes
    of a pass, of which `pass_memory` tells how many it takes. `batch_size`: prompts of a batch at most (None: no bound).
    `individuals`: of a pass (None: as many as tokens and memory allow).
    """

    tokens_that_fit: int
    tokens_at_once: int
    memory: int
    pass_memory: PassMemory
    batch_size: int | None = None
    individuals: int | None = None

    def individuals_of(self, tokens: int, read: int) -> int:
        """How many individuals a pass has whose batch has so many tokens, and logits of `read` of them; at least one."""
        if self.individuals is not None:
            return self.individuals
        return max(1, min(self.tokens_at_once // tokens, self.memory // self.pass_memory.bytes(tokens, read)))


class Pass(NamedTuple):
    """A batch of trees, padded to `shape`; trees without rows fill it up.

    It gives `shape.rows` scores a tree, one tree after the other; that of row `rows[i]` has the number `score_of_row[i]`.
    """

    trees: list[Tree]
    shape: Shape
    rows: Int[np.ndarray, "n"]
    score_of_row: Int[np.ndarray, "n"]

    @property
    def tokens(self) -> int:
        """Padding included."""
        return len(self.trees) * (self.shape.prefix + self.shape.branches)

    def cost(self, costs: Costs) -> float:
        """In tokens that meet no other, for one individual."""
        return len(self.trees) * float(costs.tree(self.shape.prefix, self.shape.branches)) / costs.token


@dataclass(frozen=True)
class Plan:
    """Passes over all rows, each batch split into so many `shards`, with so many `individuals` of a device at once.

    `tables`: how often a batch is read at once, by a method with so many. `cost`: in tokens that meet no other, for one
    individual; that of compiling each shape is in it (`prefixes.batches`).
    """

    passes: list[Pass]
    shards: int
    individuals: int
    tables: int
    cost: float

    @property
    def tokens(self) -> int:
        """Of the largest shard of a pass, for one individual and one table."""
        return max(it.tokens for it in self.passes) // self.shards


def group_rows(
    rows: Sequence[Row], budget: Budget, costs: Costs, *, shape_cost: int = 0, tables: int = 1, share: bool = True
) -> list[Tree]:
    """The rows as trees, by the grouping whose batches cost least: what two prompts share may not be worth its padding.

    `tables`: how often a tree is read at once. `share=False`: each row is a tree.
    """
    if not share:
        return [tree_of(rows, [row]) for row in range(len(rows))]
    candidates = groups(rows, costs, budget.tokens_that_fit // tables), of_one_prompt(rows)
    groupings = [[tree_of(rows, group) for group in grouping] for grouping in candidates]

    def cost(trees: list[Tree]) -> float:
        return batches(trees, budget.tokens_at_once, costs, 1, budget.batch_size, shape_cost)[0]

    return min(groupings, key=cost)


def make_plan(
    trees: Sequence[Tree], budget: Budget, costs: Costs, *, shards: int = 1, tables: int = 1, shape_cost: int = 0
) -> Plan:
    """The batches of the trees, of about `budget.tokens_at_once` a shard, and the individuals of a pass.

    `shape_cost`: what one more shape must save, in tokens (`prefixes.batches`).
    """
    cost, by_shape = batches(
        trees, budget.tokens_at_once // tables, costs, shards, budget.batch_size, shape_cost * shards // tables
    )
    passes = [_pass(batch, shape) for shape, same_shape in by_shape for batch in same_shape]
    tokens = max(it.tokens for it in passes) // shards
    read = max(len(it.trees) * it.shape.read for it in passes) // shards
    return Plan(passes, shards, budget.individuals_of(tokens, read), tables, cost)


def _pass(trees: list[Tree], shape: Shape) -> Pass:
    rows = np.concatenate([tree.rows for tree in trees]).astype(int)
    scores = [number * shape.rows + r for number, tree in enumerate(trees) for r in range(len(tree.rows))]
    return Pass(trees, shape, rows, np.array(scores, int))


def smaller(budget: Budget, plan: Plan, longest: int) -> Budget | None:
    """The budget of smaller passes than the plan's, which ran out of memory: half the individuals, or else half the tokens.

    None where nothing is left to halve: a pass is one prompt of at most `longest` tokens for one individual, or one prompt with
    many answers, which no budget cuts.
    """
    if plan.individuals > 1:
        return replace(budget, individuals=plan.individuals // 2)
    most = max(budget.tokens_that_fit, budget.tokens_at_once)
    if plan.tokens <= round_up(longest) or not most:
        return None
    half = plan.tokens * plan.tables // 2
    if half >= most:  # a tree that is padded to twice the budget and more: only a smaller budget cuts it
        half = most // 2
    return replace(
        budget,
        tokens_that_fit=min(budget.tokens_that_fit, half),
        tokens_at_once=min(budget.tokens_at_once, half),
        individuals=1,
    )
