"""The plan of a scorer's passes: rows, shapes, costs and budgets. It is pure: no model, and nothing is compiled."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import drawn

from lpes_jax.memory import PassMemory
from lpes_jax.plan import Budget, Plan, group_rows, make_plan, smaller
from lpes_jax.prefixes import Costs, Row, groups_by_prompt, make_group, round_up

COSTS = Costs(50.0, 1.0, 2.0)
MEMORY = PassMemory(token=10, read=100, fixed=1000)


@st.composite
def rows_that_begin_alike(draw) -> list[Row]:
    """Up to 12 rows of 2 to 120 tokens about up to 3 haystacks, some of them with several answers."""
    tokens = st.integers(0, 3)
    haystacks = draw(st.lists(st.lists(tokens, min_size=1, max_size=110), min_size=1, max_size=3))
    tail = st.lists(tokens, min_size=1, max_size=5)
    drawn = draw(st.lists(st.tuples(st.sampled_from(haystacks), tail, tail), min_size=1, max_size=12))
    return [(haystack + question, answer) for haystack, question, answer in drawn]


def budget_of(tokens: int, memory: int = 10**9, **given) -> Budget:
    return Budget(tokens, tokens, memory, MEMORY, **given)


@given(
    rows_that_begin_alike(),
    st.integers(32, 700),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([None, 1, 3]),
)
@settings(max_examples=drawn(80), deadline=None)
def test_every_row_has_one_score_and_fits_into_its_pass(rows, tokens, shards, tables, share, batch_size):
    budget = budget_of(tokens, batch_size=batch_size)
    trees = group_rows(rows, budget, COSTS, tables=tables, share=share)
    plan = make_plan(trees, budget, COSTS, shards=shards, tables=tables)
    assert sorted(np.concatenate([one_pass.rows for one_pass in plan.passes]).tolist()) == list(range(len(rows)))
    for one_pass in plan.passes:
        width = one_pass.shape.prefix + one_pass.shape.branches
        assert one_pass.tokens == len(one_pass.groups) * width and len(one_pass.groups) % shards == 0
        assert len(one_pass.groups) == shards or one_pass.tokens <= shards * (tokens // tables)
        assert len(one_pass.groups) <= shards * (batch_size or len(one_pass.groups))
        for row, score in zip(one_pass.rows, one_pass.score_of_row, strict=True):
            tree, number = divmod(score, one_pass.shape.rows)
            assert one_pass.groups[tree].rows[number] == row
        for tree in one_pass.groups:  # padded to the shape, and never cut
            assert max(0, one_pass.shape.prefix - tree.prefix) + len(tree.tokens) <= width
            assert len(tree.rows) <= one_pass.shape.rows and (not tree.rows or len(tree.read) <= one_pass.shape.read)
    assert plan.tokens == max(one_pass.tokens for one_pass in plan.passes) // shards


@given(rows_that_begin_alike(), st.integers(32, 700), st.integers(1, 3), st.integers(1, 2), st.sampled_from([0, 40, 4000]))
@settings(max_examples=drawn(60), deadline=None)
def test_the_cost_is_that_of_the_passes_and_of_their_shapes(rows, tokens, shards, tables, shape_cost):
    budget = budget_of(tokens)
    trees = group_rows(rows, budget, COSTS, shape_cost=shape_cost, tables=tables)
    plan = make_plan(trees, budget, COSTS, shards=shards, tables=tables, shape_cost=shape_cost)
    written = sum(float(COSTS.group(tree.prefix, len(tree.tokens) - tree.prefix)) for tree in trees) / COSTS.token
    cost_per_shape = max(0.01 * written, shape_cost * shards // tables) if shape_cost * shards // tables else 0.03 * written
    shapes = {one_pass.shape for one_pass in plan.passes}
    np.testing.assert_allclose(
        plan.cost, sum(one_pass.cost(COSTS) for one_pass in plan.passes) + len(shapes) * cost_per_shape, rtol=1e-9
    )
    if tables == shards == 1:  # prompts share what makes it cheaper
        unshared = [make_group(rows, answers) for answers in groups_by_prompt(rows)]
        assert plan.cost <= make_plan(unshared, budget, COSTS, shape_cost=shape_cost).cost


@given(rows_that_begin_alike(), st.integers(32, 3000), st.integers(1, 8), st.sampled_from([1, 3]))
@settings(max_examples=drawn(60), deadline=None)
def test_passes_that_run_out_of_memory_get_smaller_down_to_one_prompt(rows, tokens, individuals, shards):
    longest = max(len(ids) + len(answer) for ids, answer in rows)
    budget = budget_of(max(tokens, round_up(longest)), individuals=individuals)

    def plan_of(budget: Budget) -> Plan:
        return make_plan(group_rows(rows, budget, COSTS), budget, COSTS, shards=shards)

    plan, sizes = plan_of(budget), []
    while (halved := smaller(budget, plan, longest)) is not None:
        sizes.append((plan.individuals, budget.tokens_at_once, budget.tokens_that_fit))
        budget, plan = halved, plan_of(halved)
        assert plan.individuals <= sizes[-1][0] and len(sizes) < 60
        assert (plan.individuals, budget.tokens_at_once, budget.tokens_that_fit) < sizes[-1]
    assert plan.individuals == 1
    assert plan.tokens <= round_up(longest) or max(budget.tokens_at_once, budget.tokens_that_fit) == 0
    assert sorted(np.concatenate([one_pass.rows for one_pass in plan.passes]).tolist()) == list(range(len(rows)))


@given(st.integers(1, 5000), st.integers(1, 100), st.integers(0, 10**6), st.integers(1, 10**5))
def test_individuals_of_a_pass_are_as_many_as_tokens_and_memory_allow(tokens, read, memory, at_once):
    budget = replace(budget_of(1), tokens_at_once=at_once, memory=memory)
    found = budget.individuals_for(tokens, read)
    one = 10 * tokens + 100 * read + 1000

    def fits(individuals: int) -> bool:
        return individuals * tokens <= at_once and individuals * one <= memory

    assert found == 1 or fits(found)
    assert not fits(found + 1)
    assert replace(budget, individuals=7).individuals_for(tokens, read) == 7


def test_half_the_memory_halves_the_individuals():
    rows: list[Row] = [([1, 2, 3] * 20, [4, 5]), ([3, 2, 1] * 20, [4])]
    trees = [make_group(rows, [0]), make_group(rows, [1])]
    tokens, read = 2 * round_up(61), 2 * 2
    plenty = budget_of(10**6, memory=8 * MEMORY.bytes(tokens, read))
    [largest] = make_plan(trees, plenty, COSTS).passes
    assert largest.tokens == tokens
    plans = [make_plan(trees, replace(plenty, memory=plenty.memory // part), COSTS) for part in (1, 2, 8, 100)]
    assert [plan.individuals for plan in plans] == [8, 4, 1, 1]
    assert len({plan.cost for plan in plans}) == 1 and plans[0].cost == pytest.approx(largest.cost(COSTS) + 0.03 * sum(
        COSTS.group(len(tree.tokens), 0) for tree in trees) / COSTS.token)  # fmt: skip
