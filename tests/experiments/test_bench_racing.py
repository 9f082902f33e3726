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


def table_of(rng: np.random.Generator, abilities: np.ndarray) -> np.ndarray:
    """Verdicts of individuals on 200 questions that differ in how hard they are, drawn independently."""
    chances = np.clip(rng.uniform(0.1, 0.9, 200) + abilities[:, None], 0, 1)
    return (rng.uniform(size=chances.shape) < chances).astype(float)


def test_without_controls_it_is_the_race():
    rng = np.random.default_rng(0)
    values = table_of(rng, rng.uniform(-0.3, 0.3, 20))
    bar = Bar(values[:1], keep=5)
    _, wanted = race(lambda stage, chosen: values[chosen, BOUNDS[stage] : BOUNDS[stage + 1]], 20, BOUNDS, bar, least=1.0)
    none = np.zeros((0, 200))
    for test in (bench_racing.paired, bench_racing.controlled):
        np.testing.assert_array_equal(bench_racing.dropped_after(values, none, bar, BOUNDS, test, 1.0), wanted)
    assert 25 <= wanted.min() < wanted.max() == 200


def test_what_the_parents_are_known_to_answer_saves_prompts_and_drops_few_by_mistake():
    rng = np.random.default_rng(1)
    asked, wrong, reached = {"paired": 0, "controlled": 0}, dict.fromkeys(("paired", "controlled"), 0), 0
    for _ in range(60):
        values = table_of(rng, np.concatenate([np.full(8, 0.1), rng.uniform(-0.2, 0.2, 24)]))
        parents, values = values[:8], values[8:]
        controls = np.array([parents[-1], parents.mean(axis=0)])
        better = values.mean(axis=1) > parents[-1].mean()
        reached += int(better.sum())
        for name in asked:
            scored = bench_racing.dropped_after(values, controls, Bar(parents), BOUNDS, getattr(bench_racing, name), 1.0)
            asked[name] += int(scored.sum())
            wrong[name] += int((better & (scored < 200)).sum())
    assert asked["controlled"] < 0.95 * asked["paired"] and reached > 300
    assert max(wrong.values()) <= 0.03 * reached, (wrong, reached)


def test_the_estimate_allows_for_a_part_that_is_easier_than_the_whole():
    """Differences of exactly 2 x control - 1.4: -0.4 on the whole, -0.12 on a part that has more of the large controls."""
    control = np.array([0.9] * 7 + [0.8] * 7 + [0.2] * 3 + [0.1] * 3 + [0.9] * 3 + [0.8] * 3 + [0.2] * 7 + [0.1] * 7)
    values, reference = (2 * control - 1.4)[None, :20], np.zeros(20)
    assert not bench_racing.paired(values, reference, 40, 0.0, control[None])[0]
    assert bench_racing.controlled(values, reference, 40, 0.0, control[None])[0]
    assert bench_racing.controlled(values, reference, 40, 0.0, np.stack([control, control]))[0]  # the same one twice


@pytest.mark.parametrize("fitness, wanted", [([5, 1, 4, 3, 9, 8], [4, 0]), ([5, 1, 4, 3, 2, 8], [5, 0])])
def test_only_the_better_child_of_a_pair_can_breed(fitness, wanted):
    values = np.array(fitness, float)
    assert bench_racing.next_parents(values, [0, 1], [2, 3, 4, 5], 2, 2) == wanted
