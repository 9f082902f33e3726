"""Whether the files of a folder follow the JSON Schemas in docs/schemas."""

import json
from functools import cache
from pathlib import Path

from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).parents[1] / "docs" / "schemas"
BY_NAME = {
    **{f"{name}.json": name for name in ("factors", "results", "uniform", "config", "profile", "exported", "self_test")},
    "samples.jsonl": "sample",
    "history.jsonl": "history",
}


@cache
def validator(name: str) -> Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def faults(name: str, path: Path) -> list[str]:
    """What a file breaks of the schema `name`; of a .jsonl every line is a record."""
    text = path.read_text(encoding="utf-8")
    records = [json.loads(line) for line in (text.splitlines() if path.suffix == ".jsonl" else [text])]
    return [
        f"{path.name} {error.json_path}: {error.message:.200}"
        for record in records
        for error in validator(name).iter_errors(record)
    ]


def check_folder(folder: Path, *names: str) -> None:
    """Assert that the folder has the named files, and that they and all others with a schema follow it."""
    assert {*names} <= {path.name for path in folder.iterdir()}
    is_model = (folder / "model.safetensors").exists()  # whose config.json is not ours
    found = [
        path for path in sorted(folder.iterdir()) if path.name in BY_NAME and not (is_model and path.name == "config.json")
    ]
    assert [fault for path in found for fault in faults(BY_NAME[path.name], path)] == []
