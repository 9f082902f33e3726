"""The measured figures of the README and docs/: made from the records, and none outside of such tables."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))
import page_figures  # noqa: E402
import page_tables  # noqa: E402
import profile_again  # noqa: E402
import profile_tables  # noqa: E402
import readme_path  # noqa: E402

from lpes_jax.profile.findings import losses  # noqa: E402

NAMES = {path.relative_to(ROOT).as_posix(): path for path in page_figures.pages()}
UNITS = (
    r"%|s|ms|seconds?|minutes?|min|hours?|[KMG]i?B|nats|points|x|times|prompts/s|tokens/s|TFLOP/s|GPU-seconds|"
    r"(?:percent|standard errors?)"
)
WORDS = "two|three|four|five|six|seven|eight|nine|ten|twenty|thirty|sixty|hundred"
FIGURE = re.compile(rf"(?:(?<![\w.])\d[\d,.]*|\b(?:{WORDS}))\s?(?:{UNITS})(?![\w/])|±\s?\d", re.I)
# Figures that are definitions: sizes and shares of the method, not results.
DEFINITIONS = {
    "docs/explanation/transfer.md": {"95 %"},  # of an interval
    "docs/explanation/what_three_models_read.md": {"95 %", "85.6 %"},  # of the bounds; RULER's threshold
    "docs/guides/resume.md": {"2 GiB"},  # the default bound of the cache
}


def prose(text: str) -> str:
    """A page without the tables that are made from records."""
    return page_figures.BLOCK.sub("", text)


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_what_the_records_say(name):
    text = NAMES[name].read_text(encoding="utf-8")
    assert page_figures.renewed(text) == text, "run: python experiments/page_figures.py --write"
    assert text.count("<!-- figures:") == text.count("<!-- end of figures -->") == len(page_figures.BLOCK.findall(text))


@pytest.mark.parametrize("name", NAMES)
def test_no_measured_figure_stands_outside_of_these_tables(name):
    found = {match[0] for match in FIGURE.finditer(prose(NAMES[name].read_text(encoding="utf-8")))}
    assert found <= DEFINITIONS.get(name, set())


@pytest.mark.parametrize("name", NAMES)
def test_pages_can_be_read(name):
    """Paragraphs of five lines and tables of eight columns at most."""
    lines = re.sub(r"```.*?```", "", NAMES[name].read_text(encoding="utf-8"), flags=re.S).split("\n")
    wide = [line for line in lines if line.startswith("|") and line.replace("\\|", "").count("|") > 9]
    paragraphs = re.findall(r"(?:^(?![|>#\-*\d]|    |<!--).+\n){6,}", "\n".join(lines), re.M)
    assert wide == [] and paragraphs == []


def test_the_measured_path_is_that_of_the_readme():
    commands = readme_path.commands((ROOT / "README.md").read_text(encoding="utf-8"))
    verbs = [match[1] for line in commands if (match := re.match(r"python -m lpes_jax\.(\w+) ", line))]
    assert commands[:2] == ["make demo", "source .venv/bin/activate"] and "generate(" in commands[-1]
    assert verbs == ["doctor", "profile", "search", "evaluate", "export"]
    wanted = [line for line in commands if not line.startswith("source ")]
    for run in page_tables.path_record("two_cores")["runs"]:
        assert [taken["command"] for taken in run] == wanted, "the README's commands have changed: measure them again"


def test_each_table_is_on_a_page():
    on_pages = {
        match["name"] for path in NAMES.values() for match in page_figures.BLOCK.finditer(path.read_text(encoding="utf-8"))
    }
    assert on_pages == page_figures.TABLES.keys()


def test_a_changed_record_changes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old = page_tables.scaling()
    record = page_tables.record("bench_scaling/qwen_h200x4.json")
    record["scaling"][2]["prompts_a_second"] = 333.0
    (tmp_path / "bench_scaling").mkdir()
    (tmp_path / "bench_scaling/qwen_h200x4.json").write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.setattr(page_tables, "RESULTS", tmp_path)
    assert page_tables.scaling() != old and "| 4 | 333 | 2.00 | 0 |" in page_tables.scaling()
    page = f"Before.\n\n<!-- figures: scaling -->\n{old}\n<!-- end of figures -->\n\nAfter.\n"
    assert page_figures.renewed(page) == page.replace(old, page_tables.scaling())


def test_words_of_recorded_profiles_are_those_of_the_verb():
    for folder in profile_tables.MODELS:
        path = profile_tables.RESULTS / folder / "profile.json"
        old = json.loads(path.read_text(encoding="utf-8"))
        record, text = profile_again.renewed(old)
        assert (record, text) == (old, path.with_name("profile.md").read_text(encoding="utf-8"))
        grid = profile_again.grid_of(old)
        for column in old["columns"]:
            if "baseline" in column:
                measured = grid.columns[column["task"], column["length"]]
                assert grid.status(measured, 0) == column["baseline"]["status"]
                assert losses(grid, measured, 0) == column["baseline"]["losses"]


def test_what_was_not_measured_has_no_row_and_no_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [["a", "-", "1 s", "-"], ["b", "-", "-", "-"], ["c", "-", "-", "2 s"]]
    assert page_tables.measured(["", "x", "y", "z"], rows) == (["", "y", "z"], [["a", "1 s", "-"], ["c", "-", "2 s"]])
    monkeypatch.setattr(page_tables, "path_record", lambda name: {"runs": [], "models": {}, "figures": {}})
    head, _, *lines = page_tables.sizes().splitlines()
    assert head == "|  | search |" and lines
    assert all(line.startswith(("| 135M, ", "| 0.5B, ", "| 7B, ")) and "| - |" not in line for line in lines)


@pytest.mark.parametrize(
    "text", ["takes 92 s.", "9.5 GB of memory", "rises by 12 points", "27 % of", "under three minutes", "70 ± 2"]
)
def test_figures_are_noticed(text):
    assert FIGURE.search(prose(text))


@pytest.mark.parametrize(
    "text", ["10 key-value pairs", "5 steps", "two H200s", "Qwen2.5 model", "`--minutes 5 --limit 20`", "`P_0x`"]
)
def test_sizes_are_no_measured_figures(text):
    assert not FIGURE.search(prose(text))
