"""The index of experiments/results: it has exactly the current contents of the JSON files."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))
import results_index  # noqa: E402

README = ROOT / "experiments" / "results" / "README.md"


def test_the_index_is_what_the_json_files_say():
    text = README.read_text(encoding="utf-8")
    assert results_index.indexed(text) == text, "run: python experiments/results_index.py"


def test_every_result_is_in_it_and_every_link_leads_somewhere():
    text = README.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if not link.startswith("http")]
    assert [link for link in links if not (README.parent / link).exists()] == []
    found = {
        path.relative_to(README.parent).as_posix() for path in README.parent.rglob("*.json") if path.name != "factors.json"
    }
    assert found <= set(links)


def test_a_changed_figure_changes_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures = {"acc_by_position": {"0": 0.5, "100": 0.25}, "acc,none": 0.375, "acc_stderr,none": 0.02}
    record = {"methods": {"baseline": figures}, "config": {"model": "m", "num_pairs": [5, 10]}, "date": "2026-11-28T01:02:03"}
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "results.json").write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "one" / "factors.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(results_index, "RESULTS", tmp_path)
    line = "| [one](one/results.json) | baseline 37.5 ± 2.0 | `--model m --num-pairs 5 10` | - | 2026-11-28 |"
    assert results_index.index().splitlines()[2:] == [line]
    figures["acc,none"] = 0.4
    record["devices"] = {"kind": "CARD", "count": 2}
    (tmp_path / "one" / "results.json").write_text(json.dumps(record), encoding="utf-8")
    assert "| baseline 40.0 ± 2.0 |" in results_index.index() and "| 2 x CARD |" in results_index.index()


def test_of_many_figures_the_ends_or_the_two_that_matter():
    def figures(mean: float) -> dict:
        return {"acc_by_position": {"0": mean}, "acc,none": mean, "acc_stderr,none": 0.01}

    methods = {f"m{index}": figures(index / 10) for index in range(8)}
    assert results_index.figures_of({"ours": methods}) == "8 rows, from 0.0 ± 1.0 (m0) to 70.0 ± 1.0 (m7)"
    both = {"baseline": figures(0.1), "lpes": figures(0.9)}
    assert results_index.figures_of({"methods": methods | both}) == "baseline 10.0 ± 1.0; lpes 90.0 ± 1.0"
    pair = {"difference": -0.05, "standard_error": None, "p": 0.0001}
    assert results_index.figures_of({"figures": {"kv": pair}}) == "figures, kv -0.0500 (p <0.001)"
    assert results_index.figures_of({"note": 1}) == "-"
    ends = {"kv": {"length": None}, "single_1": {"length": 4096}}
    profile = {"effective_length": {"baseline": {"by_task": ends}}}
    assert results_index.figures_of(profile) == "reliable up to (tokens): single_1 4,096"
