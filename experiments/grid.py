"""Shared code of the experiments: flags, resumable grids of searches with one folder each, and tables of figures.

    cells = {f"{curve}/{seed}": flags.search(curve=curve, seed=seed) for curve in CURVES for seed in flags.seeds}
    records = run_grid(cells, flags)              # one folder per cell; finished cells are not run again
    write_tables(flags, title, [markdown_table(header, rows)], summary)

`--part 1/4` runs every fourth cell, starting with the second. Start one process per GPU with 0/4 ... 3/4 into the same folder.
A last call without `--part` finds all cells finished and writes the tables.

Letters: Q questions, S positions.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from jaxtyping import Float

from lpes_jax.choices import WeightFormat
from lpes_jax.errors import Interrupted, UserError
from lpes_jax.evaluation import BASELINE, Candidate, Conditions, Outcome, default_metrics, evaluate, slots_of
from lpes_jax.factors import LayerFactors
from lpes_jax.json_files import read_json
from lpes_jax.models.llama import Loaded, load
from lpes_jax.search import SearchSettings, preset, run_search
from lpes_jax.search.checks import check_inputs
from lpes_jax.search.scorers import fitting_prompts
from lpes_jax.settings.search import as_record
from lpes_jax.store.files import write_json, write_text
from lpes_jax.tasks.flags import task_of, title_of
from lpes_jax.tasks.prompts import check_once

MAY_REPEAT = ("weights", "train_pairs", "long_pairs", "stage_pairs", "num_examples")  # lists whose values are no names


@dataclass(frozen=True, kw_only=True)
class GridFlags:
    """Model, questions and sizes. Flags that are not given keep the preset's values, by default the paper's sizes."""

    output_path: Path = Path("runs/grid")
    """Folder of the cells, tables.md and summary.json."""
    model: str = "smollm2-135m-instruct"
    """A name in models/zoo, a folder in Hugging Face layout, a .gguf file, or a Hugging Face hub id."""
    preset: Literal["paper", "default", "quick", "best"] = "paper"
    """The preset of `python -m lpes_jax.search`."""
    task: Literal["kv", "mdqa"] = "kv"
    """kv: generated key-value pairs; mdqa: needs --data, with other questions' documents as distractors."""
    data: Path | None = None
    """mdqa: nq-open-oracle.jsonl.gz."""
    num_pairs: int | None = None
    """kv: pairs in a prompt (default 50)."""
    key_length: int | None = None
    """kv: hexadecimal characters of keys and values (default: UUIDs)."""
    queries_per_haystack: int | None = None
    """Questions per position about the same pairs or documents, which cost little more than one (default 1)."""
    num_documents: int | None = None
    """mdqa: documents in a prompt (default 10)."""
    metrics: tuple[str, ...] = ()
    """Metrics of the held-out figures (default: prefix for kv; best_subspan_em for mdqa, which needs generation)."""
    limit: int | None = None
    """Search examples (paper: 200)."""
    test_limit: int | None = None
    """Held-out examples (paper: 500)."""
    generations: int | None = None
    """GA: generations after the first (paper: 20)."""
    population_size: int | None = None
    """GA: individuals of generation 0 (paper: 32)."""
    steps: int | None = None
    """Gradient: steps (default 200)."""
    layers: str | None = None
    """Layers that are scaled, as a slice: `2:` does not scale the first two."""
    seeds: tuple[int, ...] = (0,)
    """Each seed is a run of every cell, with its own search and held-out examples."""
    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    batch_size: int | None = None
    """Prompts per forward pass (default: chosen from the memory)."""
    part: str = "0/1"
    """i/n: run only the cells i, i + n, ... (from 0), and write no tables."""

    def search(self, **changes: Any) -> SearchSettings:
        """The settings of a cell: the preset, then the given flags, then `changes`."""
        own = SearchSettings().flat().keys() - {"output_path"}
        given = {name: value for name, value in vars(self).items() if name in own and value not in (None, ())}
        if self.task == "mdqa":
            given["distractors"] = "random"
        settings = preset(self.preset, **(given | changes))
        return settings.replace(parents=min(settings.ga.parents, settings.ga.population_size))

    def describe(self, paper: str) -> str:
        """The lines under a title: our model and questions, and a note that the paper's rows are of another model."""
        settings = self.search()
        task = task_of(settings.task)
        metric = (settings.questions.metrics or default_metrics(task))[0]
        return (
            f"Ours: {Path(self.model).name}, {title_of(settings.task, task)}, {settings.questions.limit} search examples, "
            f"{settings.questions.test_limit} held-out questions, accuracy in percent ({metric}), preset {self.preset}, seeds "
            f"{' '.join(map(str, self.seeds))}. With one seed ± is the standard error over questions, with several the sample "
            "standard deviation over seeds; p: paired permutation over questions, against the baseline of the same seed."
            f"\n\n{paper}\n"
        )


def other_model(what: str) -> str:
    """The note that the paper's rows are no target."""
    return (
        f"Rows of the paper: {what}, a far larger model on other questions: compare the order and size of the "
        "differences, not the figures."
    )


def run_script(settings: type[Any], main: Callable[[Any], None], manual: str | None) -> None:
    """Parse the command line into `settings` and run `main` on it; a mistake of the user is reported in one line."""
    try:
        given = tyro.cli(settings, description=manual)
        check_lists(given)
        main(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as interrupted:
        print(interrupted, file=sys.stderr)
        sys.exit(128 + interrupted.number)


def check_lists(given: Any) -> None:
    """Raise UserError for a list that is empty, though its default is not, or has a value twice: values name cells or rows."""
    for field in fields(given):
        values, flag = getattr(given, field.name), f"--{field.name.replace('_', '-')}"
        if not isinstance(values, tuple):
            continue
        if not values and field.default != ():
            raise UserError(f"{flag}: give at least one value")
        if field.name not in MAY_REPEAT:
            check_once(values, flag)


def in_part(number: int, part: str) -> bool:
    """Whether cell `number` is in the part `i/n`. Raises UserError for an invalid part."""
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if match is None or not int(match[1]) < int(match[2]):
        raise UserError(f"--part {part!r}: give i/n with i from 0 to n - 1, such as 0/2 and 1/2")
    return number % int(match[2]) == int(match[1])


def end_part(part: str) -> None:
    """End the program unless `part` is the whole."""
    if part != "0/1":
        raise SystemExit(f"part {part} is done; when all are, the same command without --part writes the tables")


def check_same(where: Path, ran: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise UserError if the results in `where` were run with other settings than the wanted ones."""
    for name in sorted({*wanted, *ran}):
        if ran.get(name) != wanted.get(name):
            raise UserError(
                f"{where} was run with {name}={ran.get(name)!r}, not {wanted.get(name)!r}; use the same flags or another "
                "--output-path"
            )


def run_grid(cells: Mapping[str, SearchSettings], flags: GridFlags) -> dict[str, dict[str, Any]]:
    """Run the unfinished cells of the part and return the records of all cells; a part of the whole ends the program."""
    run_cells({name: cell for number, (name, cell) in enumerate(cells.items()) if in_part(number, flags.part)}, flags)
    return collect(cells, flags)


def run_cells(cells: Mapping[str, SearchSettings], flags: GridFlags) -> None:
    """Run the cells that have no results yet; an interrupted one resumes.

    Raises UserError for an invalid cell before the first one runs.
    """
    left = {name: cell for name, cell in cells.items() if not (flags.output_path / name / "results.json").exists()}
    for settings in left.values():
        check_inputs(settings)
    for name, settings in left.items():
        folder = flags.output_path / name
        print(f"== {name}", flush=True)
        resume = (folder / "history.jsonl").exists()
        loaded = loaded_once(settings.run.model, settings.devices.dtype, settings.devices.weight_format)
        measured = measured_once(settings.run.model, settings.devices.dtype, settings.devices.weight_format)
        run_search(settings.replace(output_path=folder, resume=resume), loaded, measured)


@lru_cache(maxsize=1)
def loaded_once(model: str, dtype: str, weight_format: WeightFormat = "full") -> Loaded:
    """A model, loaded once for many cells."""
    return load(model, dtype, weight_format=weight_format)


@lru_cache(maxsize=1)
def measured_once(model: str, dtype: str, weight_format: WeightFormat = "full") -> dict[Any, Outcome]:
    """Outcomes that cells share, such as the baseline's."""
    return {}


def collect(cells: Mapping[str, SearchSettings], flags: GridFlags) -> dict[str, dict[str, Any]]:
    """The records of all cells. Ends the program unless `flags.part` is the whole."""
    end_part(flags.part)
    return {name: record_of(flags.output_path / name, settings) for name, settings in cells.items()}


def record_of(folder: Path, settings: SearchSettings) -> dict[str, Any]:
    """The record of a finished search: factors, results, history. Raises UserError if its settings differ."""
    ran, wanted = read_json(folder / "config.json")["settings"], json.loads(json.dumps(as_record(settings)))
    check_same(folder, ran, wanted)
    factors, results = read_json(folder / "factors.json"), read_json(folder / "results.json")
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    return {"folder": folder, "factors": factors, "results": results, "history": history}


def figures(record: Mapping[str, Any], method: str = "lpes") -> dict[str, Any]:
    """The held-out figures of a cell's factors, or of its baseline, uniform or pi."""
    return record["results"]["methods"][method]


def scores(record: Mapping[str, Any], method: str = "lpes") -> Float[np.ndarray, "Q S"]:
    """The scores of each held-out question and position, from samples.jsonl."""
    summary = figures(record, method)
    lines = map(json.loads, (record["folder"] / "samples.jsonl").read_text(encoding="utf-8").splitlines())
    values = [float(line[summary["metric"]]) for line in lines if line["method"] == method]
    return np.array(values).reshape(-1, len(summary["acc_by_position"]))


def check_held_out(settings: SearchSettings, loaded: Loaded) -> None:
    """Raise UserError if `held_out` would, for prompts that are too long."""
    task = task_of(settings.task)
    slots = slots_of(task, settings.questions.positions)
    examples = task.examples("test", settings.questions.test_limit, settings.run.seed)
    prompts = [task.prompt(example, *slot) for example in examples for slot in slots]
    generates = (settings.questions.metrics or default_metrics(task))[0] != "prefix"
    fitting_prompts(settings, loaded.model.config, task, loaded.tokenizer, prompts, generates)


def held_out(settings: SearchSettings, loaded: Loaded, candidates: Mapping[str, LayerFactors]) -> dict[str, Outcome]:
    """Measure the plain model, as `baseline`, and factors by name, on the held-out questions of the settings."""
    task = task_of(settings.task)
    outcomes = evaluate(
        loaded.model,
        loaded.tokenizer,
        task,
        task.examples("test", settings.questions.test_limit, settings.run.seed),
        slots_of(task, settings.questions.positions),
        [Candidate(BASELINE), *(Candidate(name, factors) for name, factors in candidates.items())],
        Conditions.of(
            settings.questions,
            settings.questions.metrics or default_metrics(task)[:1],
            loaded.stop_ids,
            settings.devices.batch_size,
        ),
    )
    return {outcome.candidate.name: outcome for outcome in outcomes}


def header(first: str, positions: Sequence[int]) -> list[str]:
    """The header of a table of `row`s."""
    return [first, *(f"{position} %" for position in positions), "mean ±", "p"]


def row(name: str, seeds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Accuracy at each position and its mean in percent, averaged over seeds, and p against the baseline of each seed."""
    by_position = 100 * np.array([list(seed["acc_by_position"].values()) for seed in seeds])
    means = 100 * np.array([seed["acc,none"] for seed in seeds])
    error = seeds[0]["acc_stderr,none"] if len(seeds) == 1 else means.std(ddof=1) / 100
    spread = "" if error is None else f" ± {100 * error:.1f}"
    p = [show_p(seed["p_against_baseline,none"]) for seed in seeds if "p_against_baseline,none" in seed]
    return [name, *(f"{value:.1f}" for value in by_position.mean(axis=0)), f"{means.mean():.1f}{spread}", ", ".join(p) or "-"]


def paper_row(name: str, values: str) -> list[str]:
    """A row of the paper: accuracy at each position, then the average, as printed there."""
    return [f"paper: {name}", *values.split(), "-"]


def show_p(p: float) -> str:
    """p as it is written in tables."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def markdown_document(title: str, parts: Sequence[str]) -> str:
    """The contents of tables.md."""
    return f"# {title}\n\n" + "\n".join(parts)


def write_tables(flags: GridFlags, title: str, parts: Sequence[str], summary: Any) -> None:
    """Write `tables.md` and `summary.json`, each atomically, and print the tables."""
    text = markdown_document(title, parts)
    flags.output_path.mkdir(parents=True, exist_ok=True)
    write_text(flags.output_path / "tables.md", text)
    write_json(flags.output_path / "summary.json", summary)
    print(text)
