"""Tables as specs: how they are found, their searches and files; and the committed tables from the committed JSON."""

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpes_jax.errors import UserError
from lpes_jax.search.checks import check
from lpes_jax.search.strategies import NAMES

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))
import gradient_vs_ga  # noqa: E402
import grid  # noqa: E402
import run_table  # noqa: E402
import table_spec  # noqa: E402

RESULTS = ROOT / "experiments" / "results"
SPECS = sorted(path.stem for path in table_spec.SPECS.glob("*.toml"))
TINY: dict[str, Any] = {"model": "tiny-retriever", "preset": "quick", "limit": 50, "test_limit": 300, "seeds": (0, 1, 2)}
QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
COMMITTED: dict[str, tuple[str, dict[str, Any]]] = {  # folder: its spec, and the flags that its summary.json does not have
    "table06_curve_types/tiny_retriever": ("table06_curve_types", TINY),
    "table06_curve_types/smollm2_kv": (
        "table06_curve_types",
        {"model": "smollm2-135m-instruct", "num_pairs": 5, "limit": 25, "test_limit": 150, "seeds": (0, 1, 2)},
    ),
    "table07_control_points/tiny_retriever": ("table07_control_points", TINY),
    "table08_search_sets/tiny_retriever": ("table08_search_sets", TINY | {"seeds": (0, 1, 2, 3, 4)}),
    "table15_weights/tiny_retriever": ("table15_weights", TINY),
    "table16_deeper/tiny_retriever": ("table16_deeper", TINY),
    "population_size/tiny_retriever": ("population_size", TINY),
    "strategies/tiny_retriever": ("strategies", TINY | {"limit": 30, "test_limit": 200, "seeds": (0,)}),
    "uniform_sweep/tiny_retriever": ("uniform_sweep", TINY | {"limit": None, "seeds": (0,)}),
    "table11_gradient_vs_ga/smollm2_kv": ("table11_gradient_vs_ga", {"num_pairs": 5, "limit": 25, "test_limit": 150}),
    "table11_gradient_vs_ga/smollm2_gains": (
        "table11_gradient_vs_ga",
        {"num_pairs": 5, "limit": 25, "test_limit": 150, "curves": ("bezier",), "boxes": ("wide", "gains", "both")},
    ),
    "table11_gradient_vs_ga/qwen_kv": ("table11_gradient_vs_ga", {"model": QWEN, "limit": 12, "test_limit": 150}),
    "table11_gradient_vs_ga/qwen_mdqa": (
        "table11_gradient_vs_ga",
        {"model": "qwen.gguf", "task": "mdqa", "data": Path(__file__), "metrics": ("prefix",), "limit": 20, "test_limit": 150},
    ),
    "table11_gradient_vs_ga/appendix_c_smollm2": ("table11_gradient_vs_ga", {"num_pairs": 5, "test_limit": 200, "seeds": (0,)}),
}


def flags_of(spec: table_spec.Spec, **changes: Any) -> Any:
    return replace(table_spec.flags_type(spec)[1], **changes)


@pytest.mark.parametrize("folder", COMMITTED)
def test_committed_tables_are_what_their_json_says(folder: str):
    name, flags = COMMITTED[folder]
    spec = table_spec.read_spec(name)
    summary = json.loads((RESULTS / folder / "summary.json").read_text(encoding="utf-8"))
    parts = importlib.import_module(spec.code).tables(spec, flags_of(spec, **flags), summary)
    assert grid.markdown_document(spec.title, parts) == (RESULTS / folder / "tables.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_names_searches_that_can_be_run_and_rows_that_it_has(name: str):
    spec = table_spec.read_spec(name)
    s = flags_of(spec)
    if spec.code == "table_spec":
        cells = table_spec.cells_of(spec, s)
    else:
        boxes = spec.own["boxes"]
        cells = {
            (f"{box}_{key}", 0): cell
            for box in boxes
            for key, cell in gradient_vs_ga.group_cells(spec, s, "free", box, 0).items()
        }
    for cell in cells.values():
        check(cell)
    assert len({json.dumps(cell.flat(), default=str) for cell in cells.values()}) == len(cells)  # no two are one search
    assert (
        {cell for _, cell, _ in spec.rows or ()} <= {"", *spec.settings()} >= {cell for pair in spec.tests for cell in pair[:2]}
    )
    assert {what for _, _, what in spec.rows or ()} <= {"baseline", "uniform", "lpes"}
    assert set(spec.columns) <= {"positions", "accuracy (std)", *table_spec.COLUMNS}
    if spec.paper_columns:
        assert {title for title, _, _ in spec.rows or ()} == spec.paper.keys()
        assert {len(cells) for cells in spec.paper.values()} == {len(spec.paper_columns)}
    elif spec.code == "table_spec":  # a figure for each position, and the mean, which is theirs up to rounding
        positions = (next(iter(cells.values())) if cells else s.search()).questions.positions
        for values in ([*map(float, row.split())] for row in spec.paper.values()):
            assert len(values) == len(positions) + 1 and abs(np.mean(values[:-1]) - values[-1]) < 0.5


def test_strategies_are_all_that_there_are():
    assert table_spec.read_spec("strategies").vary["algorithm"] == ["ga", "gradient", *NAMES]


def test_what_can_be_run_is_found_by_its_name_its_beginning_and_its_number(capsys: pytest.CaptureFixture[str]):
    for asked in ("7", "07", "table7", "table07", "Table 7", "table07_control_points"):
        assert run_table.find(asked) == "table07_control_points"
    found = {"10": "bench_search", "1": "table01_positions", "population": "population_size", "transfer": "transfer"}
    assert {asked: run_table.find(asked) for asked in found} == found
    with pytest.raises(UserError, match="bench_ may be bench_search, bench_8bit, (bench_[a-z_]+, )+bench_[a-z_]+$"):
        run_table.find("bench_")
    with pytest.raises(UserError, match="table99 is not known; --list shows the names"):
        run_table.find("table99")
    run_table.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split(maxsplit=2)[:2] for line in lines if line.startswith("Table ")]
    assert [int(number) for _, number in listed] == sorted(int(number) for _, number in listed)
    for name in (*SPECS, "bench_search", "layer_groups", "table05_latency"):
        assert sum(f" {name} " in line for line in lines) == 1
    pages = [ROOT / "experiments" / "README.md", ROOT / "docs" / "reproduce.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    commands = [f"run_table.py {name.partition('_')[0] if name.startswith('table') else name}" for name in SPECS]
    assert [command for command in commands if not re.search(rf"{command}[ `]", text)] == []


@pytest.mark.parametrize("name", ["table07", "strategies", "table11", "sensitivity"])
def test_tables_and_scripts_explain_themselves(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(SystemExit) as stop:
        run_table.main([name, "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "--output-path" in out and "--num-pairs" in out
    assert {"table07": "Brute-Force", "strategies": "--budget", "table11": "--equal-seconds", "sensitivity": "--factors"}[
        name
    ] in out


def test_cells_have_equal_evaluations():
    spec = table_spec.read_spec("population_size")
    cells = table_spec.cells_of(spec, flags_of(spec))  # the paper's: 32 + 20 x (16 + 2 x 4)
    assert {cell.ga.max_evaluations for cell in cells.values()} == {512}
    assert {name: cell.ga.generations for (name, _), cell in cells.items()} == {"8": 168, "16": 84, "32": 40, "64": 20}
    spec = table_spec.read_spec("strategies")
    s = flags_of(spec, budget=100, limit=40, cells=("cma_es", "gradient"))
    gradient, cma_es = table_spec.cells_of(spec, s)["gradient", 0], table_spec.cells_of(spec, s)["cma_es", 0]
    assert (cma_es.ga.max_evaluations, cma_es.ga.generations, cma_es.objective.fitness) == (100, 100, "log_likelihood")
    assert gradient.gradient.steps == 100 * 40 * 3 // (4 * 24) and gradient.ga.max_evaluations is None
    assert table_spec.cells_of(spec, replace(s, steps=7))["gradient", 0].gradient.steps == 7
    with pytest.raises(UserError, match="--cells sgd: the cells of this table are ga, gradient, random"):
        table_spec.cells_of(spec, replace(s, cells=("sgd",)))


@pytest.mark.long
@pytest.mark.promotes
def test_a_table_is_run_in_parts_and_its_tables_are_made_again(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    flags = ["--num-pairs", "2", "--key-length", "2", "--limit", "1", "--test-limit", "2", "--population-size", "2"]
    flags += ["--generations", "0", "--model", str(model_folder), "--output-path", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match="part 1/2 is done"):
        run_table.main(["7", *flags, "--cells", "2", "3", "--part", "1/2"])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["3"]
    run_table.main(["7", *flags, "--cells", "3", "2"])
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("==")] == ["== 3/seed0", "== 2/seed0"]
    text, summary = ((tmp_path / "run" / name).read_text(encoding="utf-8") for name in ("tables.md", "summary.json"))
    assert text in out and "| 3 | " in text and "| 62.2 (± 3.97) | 5 |" in text and "| 4 |" not in text
    summary = json.loads(summary)
    found = json.loads((tmp_path / "run" / "3" / "seed0" / "results.json").read_text(encoding="utf-8"))
    history = [json.loads(line) for line in (tmp_path / "run/3/seed0/history.jsonl").read_text(encoding="utf-8").splitlines()]
    assert list(summary["ours"]) == ["Baseline", "2", "3"] and summary["ours"]["3"]["evaluations"] == len(history) == 2
    assert summary["ours"]["3"]["mean"] == pytest.approx(100 * found["methods"]["lpes"]["acc,none"])
    assert summary["command"].startswith("python experiments/run_table.py table07_control_points --num-pairs 2 ")
    assert summary["devices"] == found["devices"] and summary["date"] >= found["date"]
    monkeypatch.setattr(table_spec, "run_cells", None)
    run_table.main(["7", "--render", "--output-path", str(tmp_path / "run")])
    assert capsys.readouterr().out == f"{text}\n"
    with pytest.raises(UserError, match="nothing"):
        run_table.main(["7", "--render", "--output-path", str(tmp_path / "nothing")])


def test_refused_cells_are_listed_where_a_spec_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = table_spec.read_spec("strategies")
    s = flags_of(spec, output_path=tmp_path, cells=("ga", "pso"), seeds=(0, 1))

    def refuse(cells: dict[str, Any], _: Any) -> None:
        raise UserError(f"not {list(cells)[0]}")

    monkeypatch.setattr(table_spec, "run_cells", refuse)
    with pytest.raises(UserError, match="no cell of this table can be run: not ga/seed0"):
        table_spec.run(spec, s)
    with pytest.raises(UserError, match="^not ga/seed0"):
        table_spec.run(replace(spec, skip_refused=False), s)
    summary = {
        "about": "About.\n",
        "ours": {"ga": {"figures": [{"acc_by_position": {"0": 0.5}, "acc,none": 0.5, "acc_stderr,none": 0.1}]}},
    }
    parts = table_spec.tables(spec, s, summary | {"refused": {"pso": "too large"}})
    assert (
        parts[1].splitlines()[-1] == "| ga | 50.0 | 50.0 ± 10.0 | - | - | - | - |" and parts[2] == "Not run: pso (too large).\n"
    )


def test_search_sets_are_the_same_lines_in_other_orders(tmp_path: Path):
    data = tmp_path / "data.jsonl"
    lines = [f'{{"number": {number}}}' for number in range(20)]
    data.write_text("\n".join(lines), encoding="utf-8")
    sets = [table_spec.in_order_of(seed, data, tmp_path / "run") for seed in (0, 1)]
    read = [path.read_text(encoding="utf-8").splitlines() for path in sets]
    assert sorted(read[0]) == sorted(read[1]) == sorted(lines) and read[0] != read[1] != lines


def test_equal_prompts_and_equal_seconds():
    s = flags_of(table_spec.read_spec("table11_gradient_vs_ga"), limit=100)
    for a_step, a_look in ((24, 75), (25.0, 60)):  # prompts, one by one and in trees
        search = {"algorithm": "gradient", "look_every": 10, "prompts_a_step": a_step, "prompts_a_look": a_look}
        steps = gradient_vs_ga.steps_for_prompts(s, {"factors": {"search": search}}, 153_600)
        looks = 1 + -(-steps // 10)
        paid = gradient_vs_ga.prompts(s, {"factors": {"search": search}, "history": [{"step": steps}] * looks})
        assert 153_600 - 2 * (a_step * 4 + a_look) < paid <= 153_600
    history = [{"step": 0, "seconds": 5.0}, {"step": 10, "seconds": 12.0}, {"step": 30, "seconds": 16.0}]
    assert gradient_vs_ga.steps_for_seconds({"history": history}, 32.0) == 110  # 12 s for the first 10, then 0.2 s a step
    assert gradient_vs_ga.steps_for_seconds({"history": history}, 1.0) == 1
