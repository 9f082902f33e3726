"""Lists of positions, slots, weights and names: twice the same, or no number, is refused before any model is opened."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lpes_jax as lj
from lpes_jax.compare import CompareSettings, run_comparison
from lpes_jax.compare.__main__ import main as compare
from lpes_jax.errors import UserError
from lpes_jax.evaluate.__main__ import main as evaluate
from lpes_jax.evaluation import slots_of
from lpes_jax.search.__main__ import main as search
from lpes_jax.search.checks import check, check_weights
from lpes_jax.settings.search import SearchSettings
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.prompts import check_once, check_positions

NO_MODEL = ("--model", "./no/such/model")  # opening it would be another error


@pytest.mark.parametrize(
    "verb, flags, message",
    [
        (evaluate, ("--positions", "50", "50"), "--positions 50 50: 50 is repeated; give it once"),
        (evaluate, ("--positions", "0", "25", "100", "25"), "--positions 0 25 100 25: 25 is repeated"),
        (evaluate, ("--positions", "0", "101"), "--positions must be at most 100"),
        (evaluate, ("--slots", "3", "1", "3"), "--slots 3 1 3: 3 is repeated"),
        (evaluate, ("--task", "needle", "--lengths", "500", "500"), "--lengths 500 500: 500 is repeated"),
        (evaluate, ("--metrics", "prefix", "prefix"), "--metrics prefix prefix: prefix is repeated"),
        (search, ("--search-positions", "50", "50", "--weights", "0.5", "0.5"), "--search-positions 50 50: 50 is repeated"),
        (search, ("--search-positions", "-1", "50", "--weights", "0.5", "0.5"), "--search-positions must be at least 0"),
        (search, ("--positions", "0", "0"), "--positions 0 0: 0 is repeated"),
        (search, ("--metrics", "substring", "substring"), "--metrics substring substring: substring is repeated"),
        (search, ("--search-positions", "0", "50", "--weights", "nan", "1"), "--weights must be .* that sum to 1, got nan 1"),
        (search, ("--search-positions", "0", "50", "--weights", "0.5", "nan"), "--weights must be numbers .* got 0.5 nan"),
        (search, ("--search-positions", "0", "50", "--weights", "inf", "-inf"), "--weights must be numbers .* got inf -inf"),
        (search, ("--weights", "0.2", "0.3", "inf"), "--weights must be numbers .* got 0.2 0.3 inf"),
        (search, ("--weights", "0.2", "0.8"), "--weights 0.2 0.8: give one number for each of --search-positions 0 50 100"),
        (search, ("--max-factor", "inf"), "--max-factor must be at most .* got inf"),
        (search, ("--algorithm", "gradient", "--text-weight", "nan"), "--text-weight must be a number .* got nan"),
        (search, ("--algorithm", "gradient", "--stay-close", "-1"), "--stay-close must be at least 0, got -1"),
        (compare, ("--positions", "75", "75"), "--positions 75 75: 75 is repeated"),
        (compare, ("--metrics", "prefix", "prefix"), "--metrics prefix prefix: prefix is repeated"),
    ],
)  # fmt: skip
def test_verbs_refuse_them_in_one_line(verb, flags, message, tmp_path, capsys):
    assert verb([*NO_MODEL, *flags, "--output-path", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and said.out == ""
    assert re.search(message, said.err) and not (tmp_path / "out").exists()


def test_so_does_python():
    for settings in (
        lj.EvaluateSettings.of(model=NO_MODEL[1], positions=(50, 50)),
        lj.EvaluateSettings.of(model=NO_MODEL[1], positions=(), slots=(2, 2)),
    ):
        with pytest.raises(UserError, match="is repeated"):
            lj.run_evaluation(settings)
    with pytest.raises(UserError, match="is repeated"):
        run_comparison(CompareSettings.of(model=NO_MODEL[1], positions=(0, 50, 0)))
    with pytest.raises(UserError, match="--weights must be numbers"):
        lj.run_search(SearchSettings.of(model=NO_MODEL[1], weights=(math.nan, math.nan, 1.0)))


def test_two_slots_at_one_position_would_be_one_figure():
    task = KeyValue(num_pairs=300)
    assert slots_of(task, (), (0, 150, 299)) == [(0, 0), (150, 50), (299, 100)]
    with pytest.raises(UserError, match="--slots 0 and 1 of 300 are both at 0 %"):
        slots_of(task, (), (0, 1))
    with pytest.raises(UserError, match="--positions 50 50: 50 is repeated"):
        slots_of(task, (50, 50))


@given(st.lists(st.integers(-5, 105), max_size=6))
def test_positions_are_percentages_each_once(positions):
    good = bool(positions) and all(0 <= position <= 100 for position in positions) and len(set(positions)) == len(positions)
    if good:
        check_positions(positions)
    else:
        with pytest.raises(UserError, match="--positions"):
            check_positions(positions)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=6).filter(any))
def test_shares_of_one_are_weights(parts):
    check_weights([part / sum(parts) for part in parts], range(len(parts)))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.sampled_from([math.nan, math.inf, -math.inf, -0.5, 2.0, 1e308]))
def test_what_is_no_share_is_no_weight(weights, wrong):
    for mixed in ([*weights, wrong], [wrong, *weights], [wrong, *weights, -wrong]):
        with pytest.raises(UserError, match="--weights must be numbers from 0 that sum to 1"):
            check_weights(mixed, range(len(mixed)))


@given(
    st.sampled_from([name for name, value in SearchSettings().flat().items() if isinstance(value, float)]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_every_number_of_a_search_is_finite(name, value):
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} .*{value}"):
        check(SearchSettings.of(**{name: value}))


@given(st.lists(st.text("ab", max_size=2), max_size=4))
def test_names_stand_once(names):
    if len(set(names)) < len(names):
        with pytest.raises(UserError, match="is repeated"):
            check_once(names, "--metrics")
    else:
        check_once(names, "--metrics")
