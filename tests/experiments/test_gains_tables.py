"""The tables of gains beside other methods: known differences, and that the committed tables are those of the cells."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))
import gains_tables  # noqa: E402

FOLDERS = ("smollm2_kl", "qwen05_kl", "qwen15_kl")


def test_methods_are_compared_with_gains_question_by_question(tmp_path):
    """Factors are right on half of the questions that gains answer; the seeds of gains count with their mean."""
    right = np.ones((40, 2))
    half = right * (np.arange(40) % 2)[:, None]
    cells = {"baseline": 0 * right, "gains_seed0": right, "gains_seed1": half, "factors_seed0": half, "both_seed0": right}
    for name, scores in cells.items():
        target = {"kv, 30 pairs": {"metric": "prefix", "scores": scores.tolist()}}
        (tmp_path / f"{name}.json").write_text(json.dumps({"targets": target}), encoding="utf-8")
    (tmp_path / "about.md").write_text("# Title\n", encoding="utf-8")
    gains_tables.main(tmp_path)
    found = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    against = {method: found[method]["kv, 30 pairs"].get("against_gains") for method in found}
    assert against["gains"] is None
    assert against["factors"]["difference"] == pytest.approx(-0.25)
    assert against["both"]["difference"] == pytest.approx(0.25)
    assert all(against[method]["p_holm"] < 0.001 for method in ("factors", "both"))
    assert "| kv, 30 pairs | -25.0 (<0.001) | +25.0 (<0.001) |" in (tmp_path / "tables.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_committed_tables_are_those_of_the_cells(folder, tmp_path):
    committed = ROOT / "experiments" / "results" / "gains" / folder
    copy = Path(shutil.copytree(committed, tmp_path / folder))
    gains_tables.main(copy)
    for name in ("tables.md", "summary.json"):
        assert (copy / name).read_text(encoding="utf-8") == (committed / name).read_text(encoding="utf-8")
