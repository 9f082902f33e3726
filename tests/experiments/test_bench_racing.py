"""The replay of races in bench_racing.py: its test with control variates, and who breeds next."""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))
import bench_racing  # noqa: E402

from lpes_jax.search.racing import Bar, race  # noqa: E402

BOUNDS = [0, 25, 50, 100, 200]


def table_of(rng: np.random.Generator, chances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Verdicts of individuals on 200 questions that differ in how hard they are, and that difficulty."""
    hard = rng.uniform(size=200)
    own = rng.uniform(size=(len(chances), 200))
    return (0.8 * hard + 0.2 * own < chances[:, None]).astype(float), hard


def test_without_controls_it_is_the_race():
    rng = np.random.default_rng(0)
    values, _ = table_of(rng, rng.uniform(0.2, 0.8, 20))
    bar = Bar(values[:1], keep=5)
    _, wanted = race(lambda stage, chosen: values[chosen, BOUNDS[stage] : BOUNDS[stage + 1]], 20, BOUNDS, bar, least=1.0)
    none = np.zeros((0, 200))
    for test in (bench_racing.paired, bench_racing.controlled):
        np.testing.assert_array_equal(bench_racing.dropped_after(values, none, bar, BOUNDS, test, 1.0), wanted)
    assert 25 <= wanted.min() < wanted.max() == 200


def test_controls_that_tell_the_difficulty_save_prompts_and_drop_few_by_mistake():
    rng = np.random.default_rng(1)
    asked, wrong, reached = {"paired": 0, "controlled": 0}, dict.fromkeys(("paired", "controlled"), 0), 0
    for _ in range(60):
        values, hard = table_of(rng, rng.uniform(0.3, 0.7, 24))
        rival, values = values[:1], values[1:]
        better = values.mean(axis=1) > rival.mean()
        reached += int(better.sum())
        for name in asked:
            scored = bench_racing.dropped_after(values, hard[None], Bar(rival), BOUNDS, getattr(bench_racing, name), 1.0)
            asked[name] += int(scored.sum())
            wrong[name] += int((better & (scored < 200)).sum())
    assert asked["controlled"] < 0.97 * asked["paired"] and reached > 300
    assert wrong["controlled"] <= 0.03 * reached and wrong["paired"] <= 0.03 * reached


def test_a_control_shifts_the_estimate_by_what_the_part_is_easier_than_the_whole():
    """Differences that are exactly 2 x control - 1.5: on the whole, with a control of mean 0.5, they are -0.5."""
    control = np.tile([0.9, 0.8, 0.2, 0.1], 10)
    order = np.argsort(-control, kind="stable")  # the part has the largest controls: differences are above 0 there
    control = control[order]
    values = (2 * control - 1.5)[None, :20]
    assert values.mean() > 0
    reference = np.zeros(20)
    assert not bench_racing.paired(values, reference, 40, 0.0, control[None])[0]
    assert bench_racing.controlled(values, reference, 40, 0.0, control[None])[0]


@pytest.mark.parametrize("fitness, wanted", [([5, 1, 4, 3, 9, 8], [4, 0]), ([5, 1, 4, 3, 2, 8], [5, 0])])
def test_only_the_better_child_of_a_pair_can_breed(fitness, wanted):
    values = np.array(fitness, float)
    assert bench_racing.next_parents(values, [0, 1], [2, 3, 4, 5], 2, 2) == wanted
