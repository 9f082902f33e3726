"""RULER's tasks and many-shot classification through the verbs, as any other task."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from lpes_jax.compare.__main__ import main as compare
from lpes_jax.evaluate.__main__ import main as evaluate
from lpes_jax.search.__main__ import main as search
from lpes_jax.tasks import make_task

pytestmark = pytest.mark.promotes


def run(verb: Any, folder: Path, *arguments: object) -> list[dict[str, Any]]:
    """The samples of a verb that must succeed."""
    assert verb([*map(str, arguments), "--output-path", str(folder)]) == 0
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_they_are_searched_together(tmp_path, model_folder):
    with (tmp_path / "intents.csv").open("w", newline="") as file:
        csv.writer(file).writerows([f"do {n % 5} now, {n}", f"label {n % 5}"] for n in range(60))
    (tmp_path / "mixture.toml").write_text(
        """
        [[task]]
        task = "niah"
        subset = "multikey_2"
        num_lines = 2
        queries_per_haystack = 2
        [[task]]
        task = "many_shot"
        data = "intents.csv"
        num_shots = 3
        """
    )
    flags = ["--model", model_folder, "--mixture", tmp_path / "mixture.toml", "--limit", 2, "--test-limit", 2]
    flags += ["--positions", 0, 100, "--metrics", "prefix", "--population-size", 3, "--parents", 2, "--mutations", 1]
    flags += ["--crossovers", 1, "--generations", 0, "--control-points", 3, "--uniform-candidates", 2]
    samples = run(search, tmp_path / "run", *flags)
    assert {sample["task"] for sample in samples} == {
        "niah multikey_2, num lines 2, queries per haystack 2",
        "many_shot of intents, num shots 3",
    }
    slots = {(sample["position"], sample["slot"]) for sample in samples if "niah" in sample["task"]}
    assert slots == {(0, 0), (0, 1), (100, 2), (100, 1)}


def test_their_scores_are_those_of_the_outputs(tmp_path, model_folder):
    for settings, verb, more in (
        ({"subset": "near_keys", "num_lines": 0, "num_keys": 2}, evaluate, ["--limit", 1]),
        ({"subset": "single_1", "num_lines": 0}, compare, ["--test-limit", 1, "--methods", "baseline", "--repeats", 1]),
    ):
        task = make_task("niah", **settings)
        prompt = task.prompt(task.examples("test", 1, 0)[0], 0)
        given = [part for flag, value in settings.items() for part in (f"--{flag.replace('_', '-')}", value)]
        flags = ["--model", model_folder, "--task", "niah", *given, "--positions", 0, "--max-new-tokens", 20, *more]
        [sample] = run(verb, tmp_path / settings["subset"], *flags)
        assert sample["target"] == list(prompt.golds) and sample["example"] == prompt.example
        said = task.score(sample["output"], prompt)
        assert "recall" in sample and {metric: sample.get(metric, score) for metric, score in said.items()} == said
