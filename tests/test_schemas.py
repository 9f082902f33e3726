"""The JSON Schemas of the file formats, on the committed records. Tests of verbs check the files that they write."""

import json
from pathlib import Path

import pytest
from schemas import BY_NAME, SCHEMAS, faults, validator

ROOT = Path(__file__).resolve().parents[1]
RESULTS, ZOO = ROOT / "experiments" / "results", ROOT / "models" / "zoo"
RECORDS = [path for name in ("factors.json", "results.json", "profile.json") for path in sorted(RESULTS.rglob(name))]


def test_each_schema_is_valid_and_described():
    names = {path.name.removesuffix(".schema.json") for path in SCHEMAS.iterdir()}
    assert names == set(BY_NAME.values())
    for name in names:
        schema = validator(name).schema
        assert isinstance(schema, dict) and schema["description"]
        without = [key for key, value in schema["properties"].items() if not value.get("description")]
        assert without == [], name


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_committed_records_follow_them(path):
    assert faults(BY_NAME[path.name], path) == []


@pytest.mark.parametrize("path", sorted(ZOO.glob("*/factors/*.json")), ids=lambda path: path.stem)
def test_factors_of_the_zoo_follow_them(path):
    assert faults("factors", path) == []


@pytest.mark.parametrize(
    "change",
    [
        {"format": "lpes-factors/9"},
        {"factors": [-1.0]},
        {"factors": [[1.0]]},
        {"granularity": "head"},
        {"gains": []},
        {"gains_granularity": "all"},
        {"factors": None},
    ],
    ids=str,
)
def test_factors_that_break_the_format_are_noticed(change, tmp_path):
    record = json.loads((RESULTS / "smollm2_search/default/factors.json").read_text(encoding="utf-8"))
    (tmp_path / "factors.json").write_text(json.dumps(record), encoding="utf-8")
    assert faults("factors", tmp_path / "factors.json") == []
    (tmp_path / "factors.json").write_text(json.dumps(record | change), encoding="utf-8")
    assert faults("factors", tmp_path / "factors.json")


@pytest.mark.parametrize("name", ["results", "methods", "versions", "devices", "date"])
def test_results_without_a_part_are_noticed(name, tmp_path):
    record = json.loads((RESULTS / "smollm2_evaluate/results.json").read_text(encoding="utf-8"))
    del record[name]
    (tmp_path / "results.json").write_text(json.dumps(record), encoding="utf-8")
    assert faults("results", tmp_path / "results.json")
