"""The experiment on pruned numbers: overlaps with known answers, and cells that are searches of their own."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from lpes_jax.errors import UserError
from lpes_jax.search.checks import check

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
import prune  # noqa: E402


def mask(numbers: str) -> np.ndarray:
    return np.array([number == "1" for number in numbers])


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("1100", "1100", (1.0, 1 / 3)),  # two of two; by chance 2 * 2 / 4 = 1 of 3
        ("1100", "0110", (1 / 3, 1 / 3)),
        ("1100", "0011", (0.0, 1 / 3)),
        ("1111", "1111", (1.0, 1.0)),
        ("0000", "0000", (1.0, 1.0)),
        ("1000", "0000", (0.0, 0.0)),
    ],
)
def test_overlaps_that_are_known(first, second, found):
    assert prune.overlap(mask(first), mask(second)) == pytest.approx(found)
    assert prune.overlap(mask(second), mask(first)) == pytest.approx(found)


def test_random_sets_overlap_as_much_as_by_chance():
    rng, size = np.random.default_rng(0), 2000
    measured, chance = prune.overlap(rng.random(size) < 0.3, rng.random(size) < 0.3)
    assert measured == pytest.approx(chance, abs=0.03)


def test_each_strength_task_and_seed_is_a_search_of_its_own():
    s = prune.Settings(strengths=(0.0, 0.3), seeds=(0, 1))
    cells = [prune.cell(s, *cell) for cell in prune.all_cells(s)]
    for cell in cells:
        check(cell)
    assert len({json.dumps(cell.flat(), default=str) for cell in cells}) == len(cells) == 8
    assert {(cell.task.task, cell.task.subset, cell.gradient.prune) for cell in cells} == {
        (task, subset, strength) for task, subset in (("kv", None), ("niah", "multikey_2")) for strength in (0.0, 0.3)
    }
    assert all(cell.space.learn == "gains" and cell.text.text_weight == 0 for cell in cells)


CHANGES = [
    ({"niah_lines": -1}, "--num-lines"),
    ({"strengths": (0.0, 2.0)}, "--prune"),
    ({"text": Path("no such file")}, "--text"),
]


@pytest.mark.parametrize(("changes", "flag"), CHANGES)
def test_an_invalid_cell_is_refused_before_the_first_search(changes, flag, tmp_path):
    """The first cells, on pairs and without pruning, are valid but for the last case."""
    with pytest.raises(UserError, match=flag):
        prune.main(prune.Settings(model="tiny-retriever", output_path=tmp_path, **changes))
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.promotes
def test_searches_in_two_parts_end_in_a_table(tmp_path):
    """The whole script on the bundled model, in two parts and a last call, as on two devices."""
    flags = dict(model="tiny-retriever", num_pairs=4, key_length=4, limit=4, test_limit=2, steps=4, tasks=("kv",))
    flags |= dict(strengths=(0.0, 1.0), seeds=(0,), output_path=tmp_path, dtype="float32")
    for part in ("0/2", "1/2"):
        with pytest.raises(SystemExit, match=f"part {part} is done"):
            prune.main(prune.Settings(**flags, part=part))
    prune.main(prune.Settings(**flags))
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    plain, pruned = summary["accuracy"]["kv"]
    assert (plain["strength"], pruned["strength"]) == (0.0, 1.0)
    assert 0 <= pruned["counts"][0] < plain["counts"][0] <= summary["numbers"]
    assert "4 key-value pairs" in (tmp_path / "tables.md").read_text(encoding="utf-8")


def test_numbers_that_differ_from_1():
    assert prune.differs([[1.0, 1.0000001], [None, 0.5]]).tolist() == [[False, True], [True, True]]
