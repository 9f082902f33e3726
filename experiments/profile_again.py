"""The words and heat maps of a recorded profile, from the figures of its profile.json. No model is run.

    python experiments/profile_again.py experiments/results/profile/smollm2 single_1 kv

renews `says` in the folder's profile.json, writes profile.md, and draws the heat maps (.svg) of the tasks that are named, with
the current wording and drawing. Only profiles without factors.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np

from lpes_jax.choices import ProfileTask
from lpes_jax.evaluation import BASELINE, Candidate
from lpes_jax.profile.findings import sentence
from lpes_jax.profile.grid import Column, Grid, ProfilePlan, make_task
from lpes_jax.profile.page import draw, tables
from lpes_jax.store.files import write_json, write_text


def grid_of(record: dict[str, Any]) -> Grid:
    """The grid of a record: its accuracies, as one unit per column, with the recorded bounds."""
    config = record["config"]
    grid: Any = Grid.__new__(Grid)
    grid.loaded = SimpleNamespace(identity={"name": config["model_identity"]["name"]})
    lists = {name: tuple(config[name]) for name in ("tasks", "lengths", "positions")}
    grid.plan = ProfilePlan(**lists, **{name: config[name] for name in ("threshold", "confidence", "seed", "key_length")})
    grid.candidates = [Candidate(BASELINE)]
    grid.ceiling = {task: (found["mean"], *found["interval"]) for task, found in record["fact_alone"].items()}
    grid.columns = {}
    for found in record["columns"]:
        column = Column(found["task"], found["length"], make_task(found["task"], grid.plan.key_length))
        if (measured := found.get(BASELINE)) is not None:
            column.values = np.array(measured["accuracy"])[None, None]
            column.low, column.high = np.moveaxis(np.array(measured["intervals"])[None], 2, 0)
            column.blocks = 1
        grid.columns[column.name, column.length] = column
    return grid


def renewed(record: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The record with the current sentence, and its profile.md."""
    grid = grid_of(record)
    record = record | {"says": {BASELINE: sentence(grid, record["config"]["model_identity"]["name"], 0)}}
    return record, tables(grid, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with profile.json")
    parser.add_argument("tasks", nargs="*", help="of the heat maps")
    arguments = parser.parse_args()
    path = arguments.folder / "profile.json"
    if not path.is_file():
        parser.error(f"{path}: no such file; give the folder of a profile")
    if unknown := set(arguments.tasks) - set(get_args(ProfileTask)):
        parser.error(f"{', '.join(unknown)}: no task of profile; give some of {', '.join(get_args(ProfileTask))}")
    record, text = renewed(json.loads(path.read_text(encoding="utf-8")))
    write_json(path, record)
    write_text(path.with_name("profile.md"), text)
    with TemporaryDirectory() as drawn:
        draw(Path(drawn), grid_of(record), record | {"text_loss": None})
        for task in arguments.tasks:
            svg = (Path(drawn) / f"heat_{task}.svg").read_text(encoding="utf-8")
            write_text(path.with_name(f"heat_{task}.svg"), svg)


if __name__ == "__main__":
    main()
