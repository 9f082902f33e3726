"""The experiments' harness: parts, resuming, tables; and that every script is importable and explains itself."""

import importlib
import json
import subprocess
import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path

import numpy as np
import pytest
import tyro
from formula import Analytic, scored_as

from lpes_jax import evaluation
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.search import loop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))
import grid  # noqa: E402
import sensitivity  # noqa: E402

SCRIPTS = (
    *sorted(path.stem for path in (ROOT / "experiments").glob("table[0-9]*.py")),
    *("layer_groups", "sensitivity"),
)


@pytest.mark.promotes
def test_a_finished_cell_is_not_run_again(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    small = {"num_pairs": 2, "key_length": 2, "limit": 1, "test_limit": 1, "generations": 0, "population_size": 2}
    flags = grid.GridFlags(output_path=tmp_path, model=str(model_folder), **small)
    cells = {name: flags.search(curve=name, control_points=2, uniform_candidates=1) for name in ("linear", "bezier")}
    monkeypatch.setattr(loop, "make_scorer", scored_as(Analytic))  # scores are not tested here
    monkeypatch.setattr(evaluation, "Scorer", Analytic)
    with pytest.raises(SystemExit, match="part 1/2 is done"):
        grid.run_grid(cells, replace(flags, part="1/2"))
    assert [path.name for path in tmp_path.iterdir()] == ["bezier"]
    first = (tmp_path / "bezier" / "results.json").read_bytes()
    capsys.readouterr()
    records = grid.run_grid(cells, flags)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("==")] == ["== linear"]
    assert (tmp_path / "bezier" / "results.json").read_bytes() == first and list(records) == ["linear", "bezier"]
    record = records["linear"]
    assert grid.scores(record).shape == (1, 5)
    assert grid.scores(record).mean() == grid.figures(record)["acc,none"]
    other = {"linear": flags.search(curve="linear", control_points=2, uniform_candidates=1, seed=3)}
    with pytest.raises(UserError, match="linear was run with seed=0, not 3"):
        grid.run_grid(other, flags)


def test_each_cell_is_in_one_part():
    assert [[number for number in range(7) if grid.in_part(number, f"{i}/3")] for i in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    for wrong in ("3/3", "1", "a/2", "0/0", "-1/2"):
        with pytest.raises(UserError, match="--part"):
            grid.in_part(0, wrong)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("prune.py --seeds", "--seeds: give at least one value"),
        ("prune.py --strengths 0 0.5 0", "--strengths 0.0 0.5 0.0: 0.0 is repeated; give it once"),
        ("controls.py --counts", "--counts: give at least one value"),
        ("controls.py --controls adapter adapter", "--controls adapter adapter: adapter is repeated; give it once"),
        ("run_table.py table06 --seeds 1 2 1", "--seeds 1 2 1: 1 is repeated; give it once"),
        ("run_table.py table06 --seeds", "--seeds: give at least one value"),
    ],
)
def test_lists_that_are_empty_or_have_a_value_twice_are_refused(command, message, tmp_path):
    """Two equal seeds would count each question twice."""
    script, *flags = command.split()
    line = [sys.executable, str(ROOT / "experiments" / script), *flags, "--output-path", str(tmp_path / "out")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.strip()) == (2, f"error: {message}") and not (tmp_path / "out").exists()


def test_the_lists_of_every_script_are_valid_by_default():
    for path in sorted((ROOT / "experiments").glob("*.py")):
        if "run_script(Settings" in path.read_text(encoding="utf-8"):
            kind = importlib.import_module(path.stem).Settings
            required = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
            grid.check_lists(kind(**dict.fromkeys(required, "given")))


def test_rows_of_one_seed_and_of_several():
    def seed(first: float, last: float, p: float) -> dict:
        by_position = {"0": first, "100": last}
        mean = (first + last) / 2
        return {"acc_by_position": by_position, "acc,none": mean, "acc_stderr,none": 0.02, "p_against_baseline,none": p}

    assert grid.row("one", [seed(0.5, 0.25, 0.0004)]) == ["one", "50.0", "25.0", "37.5 ± 2.0", "<0.001"]
    two = grid.row("two", [seed(0.5, 0.25, 0.04), seed(0.7, 0.45, 0.5)])
    assert two == ["two", "60.0", "35.0", "47.5 ± 14.1", "0.040, 0.500"]  # 14.1: of 37.5 and 57.5
    assert grid.paper_row("theirs", "70.4 60.4 65.4") == ["paper: theirs", "70.4", "60.4", "65.4", "-"]
    table = grid.markdown_table(grid.header("method", (0, 100)), [two])
    assert table.splitlines() == [
        "| method | 0 % | 100 % | mean ± | p |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| two | 60.0 | 35.0 | 47.5 ± 14.1 | 0.040, 0.500 |",
    ]


def test_tables_are_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    grid.write_tables(grid.GridFlags(output_path=tmp_path / "new"), "Title", ["one\n", "two\n"], {"x": 1})
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["summary.json", "tables.md"]
    assert (tmp_path / "new" / "tables.md").read_text() == "# Title\n\none\n\ntwo\n"
    assert json.loads((tmp_path / "new" / "summary.json").read_text()) == {"x": 1} and "two" in capsys.readouterr().out


def test_flags_reach_the_search():
    search = grid.GridFlags(preset="paper", limit=7, population_size=5, layers="2:").search(seed=3).flat()
    asked = {"limit": 7, "parents": 5, "layers": "2:", "seed": 3}
    preset = {"test_limit": 500, "initial_factor": 1.5, "y_step": 0.1, "generations": 20}
    assert (asked | preset).items() <= search.items()
    assert grid.GridFlags(task="mdqa").search().task.distractors == "random"


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_explain_themselves(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module(name)
    with pytest.raises(SystemExit) as stop:
        tyro.cli(script.Settings, description=script.__doc__, args=["--help"])
    assert stop.value.code == 0 and "--output-path" in capsys.readouterr().out and not any(tmp_path.iterdir())
    pages = (ROOT / "experiments" / "README.md", ROOT / "docs" / "reproduce.md")
    assert any(f"python experiments/{name}.py " in page.read_text(encoding="utf-8") for page in pages)


def test_neighbours_move_one_control_point_each():
    found = LayerFactors(np.ones(6), curve={"type": "linear", "control_points": [[0, 1.2], [3, 1.8]], "layers": [2, 5]})
    s = sensitivity.Settings(factors=Path("factors.json"))
    points, individuals = sensitivity.neighbours(found, s)
    assert points == [(2.0, 1.2), (5.0, 1.8)] and individuals.shape == (5, 6)
    np.testing.assert_allclose(individuals[0], [1, 1, 1.2, 1.4, 1.6, 1.8], rtol=1e-6)
    np.testing.assert_allclose(individuals[1:, 2], [0.9, 1.5, 1.2, 1.2], rtol=1e-6)
    np.testing.assert_allclose(individuals[1:, 5], [1.8, 1.8, 1.5, 2.1], rtol=1e-6)
    with pytest.raises(UserError, match="--change"):
        sensitivity.neighbours(LayerFactors(np.full(6, 0.3)), s)
