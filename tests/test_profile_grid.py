"""What a grid decides, by hand: statuses, effective lengths, which column is next, the first sentence."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lpes_jax.evaluation import Candidate
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import Llama, Loaded
from lpes_jax.profile.findings import changes, effective, losses, ruler_mean, sentence
from lpes_jax.profile.grid import MOST_UNITS, UNITS, Grid, ProfilePlan, arrays
from lpes_jax.profile.page import record_of, tables
from lpes_jax.statistics import confidence_sequence

LENGTHS = (200, 300, 400)


def words(texts: list[str]) -> dict[str, list[list[int]]]:
    """A tokenizer: each word is a token."""
    return {"input_ids": [[len(word) for word in text.split()] for text in texts]}


@pytest.fixture
def grid(tiny_model: Llama) -> Callable[..., Grid]:
    """Makes one of kv and near_keys, at three positions, with these shares of right answers without a haystack."""

    def make(candidates: int = 1, ceilings: tuple[float, ...] = (1.0, 0.2), lengths: tuple[int, ...] = LENGTHS) -> Grid:
        tokenizer: Any = words
        plan = ProfilePlan(("kv", "near_keys"), lengths, (0, 50, 100), 0.856, 0.95, 0)
        loaded = Loaded(tiny_model, tokenizer, {"name": "M"}, [])
        made = Grid(loaded, plan, [Candidate(f"c{number}") for number in range(candidates)])
        for name, ceiling in zip(plan.tasks, ceilings, strict=True):
            made.ceiling[name] = (ceiling, ceiling - 0.02, min(1.0, ceiling + 0.02))
        return made

    return make


def fill(grid: Grid, name: Any, length: int, units: int, *accuracy: tuple[float, ...]) -> None:
    """A column with the accuracy of each candidate at each position, in `units` units of one question."""
    column = grid.columns[name, length]
    values = np.array(
        [[[number < round(share * units) for share in row_shares] for row_shares in accuracy] for number in range(units)], float
    )
    bounds = np.array(
        [[confidence_sequence(cell, grid.alpha) for cell in row_shares] for row_shares in values.transpose(1, 2, 0)]
    )
    column.values, column.low, column.high, column.blocks = values, bounds[..., 0], bounds[..., 1], units // UNITS
    column.seconds = [1.0]


def test_a_column_is_above_when_every_position_is_and_below_when_one_is(grid):
    made = grid()
    for units, accuracy, status in (
        (80, (1.0, 1.0, 1.0), "above"),
        (16, (1.0, 1.0, 1.0), "undecided"),
        (80, (1.0, 1.0, 0.9), "undecided"),
        (80, (1.0, 0.5, 1.0), "below"),
    ):
        fill(made, "kv", 200, units, accuracy)
        assert made.status(made.columns["kv", 200], 0) == status
    made.ceiling["kv"] = (0.6, 0.58, 0.62)  # what is lost without a haystack does not depend on positions
    fill(made, "kv", 200, 320, (0.68, 0.7, 0.75))
    assert made.status(made.columns["kv", 200], 0) == "above"


def test_effective_length_stops_at_the_first_length_that_is_not_above(grid):
    made = grid()
    fill(made, "kv", 200, 80, (1.0, 1.0, 1.0))
    fill(made, "kv", 400, 80, (1.0, 1.0, 1.0))
    assert effective(made, "kv", 0).length == 200  # 300 was not measured
    fill(made, "kv", 300, 80, (1.0, 0.0, 1.0))
    found = effective(made, "kv", 0)
    assert (found.length, found.lost_at, found.estimate) == (200, 300, 200)
    fill(made, "kv", 300, 16, (1.0, 1.0, 0.9))
    found = effective(made, "kv", 0)
    assert (found.length, found.lost_at, found.estimate) == (200, None, 400)
    lost = losses(made, made.columns["kv", 300], 0)
    assert lost["position"] == pytest.approx(1 - 14 / 16) and lost["worst_position"] == 100
    assert lost["answer_format"] == lost["length"] == 0


def test_rulers_rule_takes_means_and_counts_tasks_that_fail_as_zero(grid):
    made = grid(ceilings=(1.0, 1.0))
    for length, accuracy in ((200, 1.0), (300, 0.9), (400, 0.8)):
        fill(made, "kv", length, 40, (1.0, accuracy, accuracy))
        fill(made, "near_keys", length, 40, (1.0, accuracy, accuracy))
    assert ruler_mean(made, 0) == 400  # (1 + 0.8 + 0.8) / 3 = 0.867, though the worst position has 0.8
    assert effective(made, "kv", 0).estimate == 300
    made.ceiling["near_keys"] = (0.1, 0.05, 0.15)
    for length in LENGTHS:
        made.columns["near_keys", length].blocks = 0
    assert ruler_mean(made, 0) is None


def test_first_each_column_then_what_decides_then_the_rest(grid):
    made = grid(ceilings=(1.0, 1.0))
    order = []
    while (column := made.next()) is not None and not column.blocks:
        order.append((column.length, column.name))
        accuracy = (1.0, 0.0, 1.0) if column.length == 400 else (1.0, 0.9, 1.0)
        fill(made, column.name, column.length, 32, accuracy)
    assert [length for length, _ in order] == [200, 200, 300, 300, 400, 400]
    assert column is made.columns["kv", 200]  # both lengths are undecided: the shorter one decides
    fill(made, "kv", 200, 80, (1.0, 1.0, 1.0))
    fill(made, "near_keys", 200, 80, (1.0, 0.4, 1.0))
    assert made.next() is made.columns["kv", 300]
    fill(made, "kv", 300, MOST_UNITS, (1.0, 0.86, 1.0))
    assert made.status(made.columns["kv", 300], 0) == "undecided"
    assert made.next() is made.columns["near_keys", 300]  # it decides nothing, and is undecided
    assert made.next(skipped={id(made.columns["near_keys", 300])}) is None
    made.ceiling["near_keys"] = (0.3, 0.2, 0.4)  # a task that fails without a haystack is not measured
    assert made.next() is None


def test_a_length_that_holds_no_question_is_missing_and_breaks_nothing(grid):
    made = grid(ceilings=(1.0, 1.0), lengths=(20, 300))
    column = made.columns["near_keys", 20]
    assert column.task is None and column.missing == "its shortest prompts have 129 tokens"
    fill(made, "near_keys", 300, 80, (1.0, 1.0, 1.0))
    assert effective(made, "near_keys", 0).length == 300
    assert "near_keys at 20 (its shortest prompts have 129 tokens)" in tables(
        made, record_of(made, None, {}, 0.0) | {"says": {}}
    )


def test_the_first_sentence(grid):
    made = grid()
    not_judged = " Not judged, with too few right answers even without a haystack: near_keys (20 %)."
    assert sentence(made, "M", 0) == (
        "Whether M finds a fact at every position in prompts of 200 tokens is undecided (kv): too few questions for "
        f"95 % confidence.{not_judged}"
    )
    fill(made, "kv", 200, 80, (1.0, 1.0, 1.0))
    fill(made, "kv", 300, 80, (1.0, 0.25, 1.0))
    assert sentence(made, "M", 0) == (
        "M finds a fact at every position in prompts of up to 200 tokens (kv), with 95 % confidence. The first certain loss is "
        f"kv at 300 tokens, with the fact at 50 %: 25 % right, against 100 % without a haystack.{not_judged}"
    )
    made.ceiling["near_keys"] = (1.0, 0.98, 1.0)
    assert "confidence. At 200 tokens, near_keys had too few questions for a decision. The first" in sentence(made, "M", 0)
    fill(made, "near_keys", 200, 80, (0.0, 0.25, 1.0))
    assert sentence(made, "M", 0).startswith(
        "M finds a fact at every position in prompts of up to 200 tokens (kv); in near_keys not even in prompts of 200 tokens"
    )
    made.ceiling = {"kv": (0.1, 0.0, 0.2), "near_keys": (0.42, 0.3, 0.5)}
    assert "answers none of these tasks even without a haystack (at best 42 %)" in sentence(made, "M", 0)


def test_a_loss_at_a_longer_length_says_nothing_about_an_undecided_shorter_one(grid):
    made = grid(ceilings=(1.0, 1.0))
    fill(made, "kv", 200, 16, (1.0, 0.9, 1.0))
    fill(made, "kv", 300, 80, (1.0, 0.25, 1.0))
    fill(made, "near_keys", 200, 80, (1.0, 1.0, 1.0))
    said = sentence(made, "M", 0)
    assert "not even" not in said and "At 200 tokens, kv had too few questions for a decision." in said
    assert "The first certain loss is kv at 300 tokens" in said
    assert "| kv, c0 | 100 | not decided | 300 |" in tables(made, record_of(made, None, {}, 0.0))
    fill(made, "kv", 200, 80, (1.0, 0.25, 1.0))
    assert "in kv not even in prompts of 200 tokens" in sentence(made, "M", 0)
    assert "| kv, c0 | 100 | - | 200 |" in tables(made, record_of(made, None, {}, 0.0))
    made.ceiling["kv"] = (0.2, 0.1, 0.3)
    assert "| kv, c0 | 20 | not judged | - |" in tables(made, record_of(made, None, {}, 0.0))


def test_changes_are_paired_by_unit_and_corrected_for_all_cells(grid):
    made = grid(candidates=2)
    fill(made, "kv", 200, 80, (1.0, 0.2, 0.5), (1.0, 0.9, 0.5))
    first, middle, last = changes(made)
    assert (first["better"], middle["better"], middle["worse"], last["p"]) == (0, 56, 0, 1.0)
    assert middle["p"] < 1e-10 and middle["p_holm"] == pytest.approx(3 * middle["p"]) and first["p_holm"] == 1.0
    assert middle["p_mcnemar"] == 1.0  # the first block holds the same units for both


def test_candidates_without_factors_have_ones_of_the_same_shape():
    given = LayerFactors(np.full((2, 3), 1.5), "layer_band", np.full(2, 0.9))
    (factors, granularity), (gains, gains_granularity) = arrays([Candidate("a"), Candidate("b", given)], 2)
    assert granularity == "layer_band" and gains_granularity == "layer" and gains is not None
    np.testing.assert_array_equal(factors, [np.ones((2, 3)), np.full((2, 3), 1.5)])
    np.testing.assert_array_equal(gains, [np.ones(2), np.full(2, 0.9)])
    (factors, granularity), (gains, _) = arrays([Candidate("a")], 2)
    assert factors.shape == (1, 2) and granularity == "layer" and gains is None
