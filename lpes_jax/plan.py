"""Plan the passes of a scorer over its rows: their rows, shapes and cost. Pure: no model, no device.

    groups = group_rows(rows, budget, costs)    # groups of rows with a shared prefix (`lpes_jax.prefixes`)
    plan = make_plan(groups, budget, costs)     # batches of groups with similar shapes, within the budget
    budget = smaller(budget, plan, longest)     # after a pass of the plan ran out of memory

`lpes_jax.scoring` runs a plan: it puts the batches on devices and collects the scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from lpes_jax.memory import PassMemory
from lpes_jax.prefixes import Costs, Group, Row, Shape, batches, cheapest_groups, groups_by_prompt, make_group, round_up


@dataclass(frozen=True)
class Budget:
    """The limits of a pass on one device.

    Attributes:
        tokens_that_fit: Tokens of a group, including padding.
        tokens_at_once: Tokens of a batch, for one individual.
        memory: Bytes of a pass.
        pass_memory: Computes the bytes that a pass needs.
        batch_size: Groups of a batch; None means no limit.
        individuals: Individuals of a pass; None means as many as tokens and memory allow.
    """

    tokens_that_fit: int
    tokens_at_once: int
    memory: int
    pass_memory: PassMemory
    batch_size: int | None = None
    individuals: int | None = None

    def individuals_for(self, tokens: int, read: int) -> int:
        """The individuals of a pass over `tokens` tokens with logits of `read` of them; at least one."""
        if self.individuals is not None:
            return self.individuals
        return max(1, min(self.tokens_at_once // tokens, self.memory // self.pass_memory.bytes(tokens, read)))


class Pass(NamedTuple):
    """A batch of groups, padded to `shape` and filled up with groups without rows.

    It returns `shape.rows` scores per group, group by group; the score of row `rows[i]` has the index `score_of_row[i]`.
    """

    groups: list[Group]
    shape: Shape
    rows: Int[np.ndarray, "n"]
    score_of_row: Int[np.ndarray, "n"]

    @property
    def tokens(self) -> int:
        """The tokens of the batch, including padding."""
        return len(self.groups) * (self.shape.prefix + self.shape.branches)

    def cost(self, costs: Costs) -> float:
        """The cost for one individual, in tokens without attention."""
        return len(self.groups) * float(costs.group(self.shape.prefix, self.shape.branches)) / costs.token


@dataclass(frozen=True)
class Plan:
    """Passes over all rows.

    Attributes:
        passes: The passes.
        shards: The number of shards of each batch.
        individuals: Individuals per device and pass.
        tables: RoPE tables of the method. A pass runs its batch with each of them.
        cost: For one individual, in tokens without attention, including the cost of compiling each shape (`prefixes.batches`).
    """

    passes: list[Pass]
    shards: int
    individuals: int
    tables: int
    cost: float

    @property
    def tokens(self) -> int:
        """The tokens of the largest shard, for one individual and one table."""
        return max(one_pass.tokens for one_pass in self.passes) // self.shards


def group_rows(
    rows: Sequence[Row], budget: Budget, costs: Costs, *, shape_cost: int = 0, tables: int = 1, share: bool = True
) -> list[Group]:
    """Group the rows so that their batches cost least. Prompts share a prefix only if that saves more than its padding costs.

    Args:
        rows: The rows.
        budget: The limits of a pass.
        costs: The cost model.
        shape_cost: See `prefixes.batches`.
        tables: The RoPE tables of the method.
        share: False makes each row a group.
    """
    if not share:
        return [make_group(rows, [row]) for row in range(len(rows))]
    candidates = cheapest_groups(rows, costs, budget.tokens_that_fit // tables), groups_by_prompt(rows)
    groupings = [[make_group(rows, indices) for indices in grouping] for grouping in candidates]

    def cost(groups: list[Group]) -> float:
        return batches(groups, budget.tokens_at_once, costs, 1, budget.batch_size, shape_cost)[0]

    return min(groupings, key=cost)


def make_plan(
    groups: Sequence[Group], budget: Budget, costs: Costs, *, shards: int = 1, tables: int = 1, shape_cost: int = 0
) -> Plan:
    """Plan batches of the groups, of about `budget.tokens_at_once` tokens per shard, and the individuals of a pass.

    Args:
        groups: The groups.
        budget: The limits of a pass.
        costs: The cost model.
        shards: The number of shards of each batch.
        tables: The RoPE tables of the method.
        shape_cost: Tokens that one more shape must save (`prefixes.batches`).
    """
    cost, by_shape = batches(
        groups, budget.tokens_at_once // tables, costs, shards, budget.batch_size, shape_cost * shards // tables
    )
    passes = [_pass(batch, shape) for shape, same_shape in by_shape for batch in same_shape]
    tokens = max(one_pass.tokens for one_pass in passes) // shards
    read = max(len(one_pass.groups) * one_pass.shape.read for one_pass in passes) // shards
    return Plan(passes, shards, budget.individuals_for(tokens, read), tables, cost)


def _pass(groups: list[Group], shape: Shape) -> Pass:
    rows = np.concatenate([group.rows for group in groups]).astype(int)
    scores = [number * shape.rows + r for number, group in enumerate(groups) for r in range(len(group.rows))]
    return Pass(groups, shape, rows, np.array(scores, int))


def smaller(budget: Budget, plan: Plan, longest: int) -> Budget | None:
    """The budget after a pass of the plan ran out of memory: half the individuals, or with one individual half the tokens.

    None if nothing is left to halve: a pass is one prompt of at most `longest` tokens for one individual, or one prompt with
    many answers, which cannot be split.
    """
    if plan.individuals > 1:
        return replace(budget, individuals=plan.individuals // 2)
    most = max(budget.tokens_that_fit, budget.tokens_at_once)
    if plan.tokens <= round_up(longest) or not most:
        return None
    half = plan.tokens * plan.tables // 2
    if half >= most:  # one group is padded to at least twice the budget, and only a smaller budget splits it
        half = most // 2
    return replace(
        budget,
        tokens_that_fit=min(budget.tokens_that_fit, half),
        tokens_at_once=min(budget.tokens_at_once, half),
        individuals=1,
    )
