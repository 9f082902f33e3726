"""Tables of searches as data: the files in specs/, the searches that they describe, and their tables.

    spec = read_spec("table07_control_points")
    summary = run(spec, flags)              # one search per cell and seed; finished ones are not run again
    tables(spec, flags, summary)            # Markdown, from the contents of summary.json

The command is `run_table.py`.
"""

import math
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from grid import (
    GridFlags,
    check_held_out,
    collect,
    figures,
    header,
    held_out,
    in_part,
    loaded_once,
    markdown_table,
    other_model,
    paper_row,
    row,
    run_cells,
    scores,
    show_p,
)

from lpes_jax.errors import UserError
from lpes_jax.evaluation import slots_of
from lpes_jax.factors import LayerFactors
from lpes_jax.results import figures_of
from lpes_jax.search import SearchSettings
from lpes_jax.statistics import paired_permutation_test
from lpes_jax.store.files import write_text
from lpes_jax.store.provenance import environment
from lpes_jax.tasks.flags import task_of
from lpes_jax.text_files import read_text

SPECS = Path(__file__).with_name("specs")
PASSES_PER_STEP = 4  # forward passes that cost as much as a forward and backward pass with rematerialised layers

# Columns with one number per search: its key in summary.json, and its format.
COLUMNS = {
    "generations": ("generations", ".0f"),
    "generations until best": ("generations_until_best", ".3g"),
    "its fitness": ("fitness", ".4f"),
    "fitness of best": ("fitness", ".4f"),
    "evaluations": ("evaluations", ".0f"),
    "individuals scored": ("evaluations", ".0f"),
    "seconds": ("seconds", ".0f"),
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A table: the searches that it needs, and how their results are shown. Values are those of the TOML file.

    Attributes:
        name: The file's name.
        title: The table's title.
        manual: The text of `--help`.
        about: The text above the table, in which {names} are flags.
        paper_model: The model of the paper's rows.
        flags: Other defaults of the command's flags.
        options: Flags of this table only, each with `default` and `help`; those named like a search's flag set that flag.
        cells: Flags of each cell's searches, by the name of its folder ("": a single cell).
        vary: A flag and its values; each value is a cell, named after it.
        fixed: Flags of all searches.
        equal_evaluations: Whether each cell may score --budget individuals, by default as many as the GA of the flags.
        skip_refused: Whether cells that the search refuses are listed with the reason.
        measure: What is measured together on one set of questions: "found" (by each cell) or "uniform" (the flag --factors).
        first_column: Its header.
        columns: Names in `COLUMNS`, "positions" (accuracy at each, mean, p) or "accuracy (std)" (over positions).
        rows: Title, cell ("": the first that ran), and which result: baseline, uniform (the tuned uniform factor) or lpes (the
            found factors). Default: the baseline, then the found factors of every cell.
        tests: Two cells that are compared question by question, and the name of the test in the line below the table.
        paper: The paper's rows as printed, below ours; or, with `paper_columns`, cells beside our rows with the same titles.
        paper_columns: See `paper`.
        paper_totals: With "found", the paper's mean and variance over the sets.
        code: The module whose `run` and `tables` replace those of this one.
        own: Further entries for that module.
    """

    name: str
    title: str
    manual: str
    about: str = ""
    paper_model: str = ""
    flags: dict[str, Any] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    vary: dict[str, list[Any]] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    equal_evaluations: bool = False
    skip_refused: bool = False
    measure: Literal["", "found", "uniform"] = ""
    first_column: str = ""
    columns: list[str] = field(default_factory=lambda: ["positions"])
    rows: list[list[str]] | None = None
    tests: list[list[str]] = field(default_factory=list)
    paper: dict[str, Any] = field(default_factory=dict)
    paper_columns: list[str] = field(default_factory=list)
    paper_totals: list[str] = field(default_factory=list)
    code: str = "table_spec"
    own: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, dict[str, Any]]:
        """The flags of each cell, by its name."""
        varied = {str(value): {flag: value} for flag, values in self.vary.items() for value in values}
        return self.cells | varied

    def all_rows(self) -> list[list[str]]:
        """Title, cell and result of each row, in order."""
        if self.rows is not None:
            return self.rows
        return [["baseline", "", "baseline"], *([name, name, "lpes"] for name in self.settings())]


def read_spec(name: str) -> Spec:
    """The spec in `specs/NAME.toml`."""
    return Spec(name=name, **tomllib.loads((SPECS / f"{name}.toml").read_text(encoding="utf-8")))


def flags_type(spec: Spec) -> tuple[type[GridFlags], GridFlags]:
    """The flags of a table, which are those of all grids plus its own, and their defaults."""
    cells = {"default": [], "help": f"Run only these cells, of: {', '.join(spec.settings())}."}
    render = {"default": False, "help": "Run nothing; print the tables of the summary.json in --output-path."}
    options = spec.options | ({"cells": cells} if len(spec.settings()) > 1 else {}) | {"render": render}
    own = []
    for name, option in options.items():
        value = as_flag(option["default"])
        kind = tuple[type(value[0]) if value else str, ...] if isinstance(value, tuple) else type(value)
        own.append((name, Annotated[kind, tyro.conf.arg(help=option["help"])], field(default=value)))
    made: Any = make_dataclass("Flags", own, bases=(GridFlags,), frozen=True, kw_only=True)
    defaults = {name: as_flag(value) for name, value in spec.flags.items()}
    return made, made(**{"output_path": Path("runs") / spec.name, **defaults})


def as_flag(value: Any) -> Any:
    """A value of a TOML file as a value of settings."""
    return tuple(value) if isinstance(value, list) else value


def cells_of(spec: Spec, s: GridFlags) -> dict[tuple[str, int], SearchSettings]:
    """The search of each cell and seed."""
    made = spec.settings()
    chosen = getattr(s, "cells", ()) or tuple(made)
    if unknown := [name for name in chosen if name not in made]:
        raise UserError(f"--cells {unknown[0]}: the cells of this table are {', '.join(made)}")
    cells = {}
    for name, seed in ((name, seed) for name in made if name in chosen for seed in s.seeds):
        changes = {flag: as_flag(value) for flag, value in (spec.fixed | made[name]).items()}
        if spec.equal_evaluations:
            changes |= equal_evaluations(s, changes)
        if spec.measure == "found" and s.data is not None:
            changes["data"] = in_order_of(seed, s.data, s.output_path)
        cells[name, seed] = s.search(seed=seed, **changes)
    return cells


def equal_evaluations(s: GridFlags, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that give a search as many scored individuals as the others, or as many gradient steps as cost the same."""
    usual, budget = s.search(**changes), getattr(s, "budget", None)
    if usual.algorithm == "gradient":
        prompts = (budget or 0) * usual.questions.limit * len(usual.objective.search_positions)
        return {} if s.steps else {"steps": max(1, round(prompts / (PASSES_PER_STEP * usual.gradient.minibatch_size)))}
    if budget is not None:
        return {"max_evaluations": budget, "generations": budget}  # generations are never the limit
    own = s.search()
    budget = own.ga.population_size + own.ga.generations * (own.ga.mutations + 2 * own.ga.crossovers)
    needed = math.ceil(max(budget - usual.ga.population_size, 0) / (usual.ga.mutations + 2 * usual.ga.crossovers))
    return {"max_evaluations": budget, "generations": 2 * needed}


def run(spec: Spec, s: GridFlags) -> dict[str, Any]:
    """Run the unfinished searches of the part; returns the contents of summary.json. A part ends the program."""
    cells, refused = cells_of(spec, s), {}
    if spec.measure:
        settings = held_out_settings(s)
        check_held_out(settings, loaded_once(s.model, settings.devices.dtype, settings.devices.weight_format))
    for number, ((name, seed), cell) in enumerate(cells.items()):
        if in_part(number, s.part) and name not in refused:
            try:
                run_cells({folder_of(name, seed): cell}, s)
            except UserError as error:
                if not spec.skip_refused:
                    raise
                refused[name] = str(error)
    remaining = {key: cell for key, cell in cells.items() if key[0] not in refused}
    if cells and not remaining:
        raise UserError(f"no cell of this table can be run: {next(iter(refused.values()))}")
    found = collect({folder_of(*key): cell for key, cell in remaining.items()}, s)
    records = {name: [found[folder_of(name, seed)] for seed in s.seeds] for name, _ in remaining}
    ours = {}
    for title, name, what in spec.all_rows():
        if seed_records := records.get(name or next(iter(records), "")):
            ours[title] = entry(seed_records, what, spec.columns)
    summary: dict[str, Any] = {"ours": ours, "paper": spec.paper}
    for first, second, _ in spec.tests:
        if first in records and second in records:
            pairs = zip(records[first], records[second], strict=True)
            summary[f"p_{first}_against_{second}"] = [paired_permutation_test(scores(a), scores(b)) for a, b in pairs]
    if spec.measure:
        summary |= measured(spec, s, list(found.values()))
    return summary | ({"refused": refused} if spec.skip_refused else {}) | provenance(list(found.values()))


def folder_of(cell: str, seed: int) -> str:
    """The folder of a cell's search, below --output-path."""
    return f"{cell}/seed{seed}" if cell else f"seed{seed}"


def entry(records: Sequence[dict[str, Any]], what: str, columns: Sequence[str]) -> dict[str, Any]:
    """A row in summary.json: the held-out figures of each seed, and the means over seeds of its columns."""
    found = [figures(record, what) for record in records]
    means: dict[str, list[float]] = {}
    if "accuracy (std)" in columns:  # in percent; standard deviation of the population
        by_position = [100 * np.array(list(result["acc_by_position"].values())) for result in found]
        means = {"mean": [values.mean() for values in by_position], "std": [values.std() for values in by_position]}
    for key in (COLUMNS[name][0] for name in columns if name in COLUMNS and what == "lpes"):
        means[key] = [number(record, key) for record in records]
    return {"figures": found} | {key: float(np.mean(values)) for key, values in means.items()}


def number(record: dict[str, Any], key: str) -> float:
    """A search's cost, the fitness of its best individual, or the generation that found it."""
    search, history = record["factors"]["search"], record["history"]
    if key == "generations":
        return history[-1]["generation"]
    if key == "generations_until_best":
        return next(line["generation"] for line in history if line["id"] == search["best_individual"])
    return search[{"fitness": "fitness_of_best", "evaluations": "evaluations_of_algorithm"}.get(key, key)]


def provenance(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Versions, devices and date of the newest search; without searches, of this process."""
    now = environment() | {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    newest = max((record["results"] for record in records), key=lambda results: results["date"], default=now)
    return {name: newest[name] for name in ("versions", "devices", "date")}


def held_out_settings(s: GridFlags) -> SearchSettings:
    """The settings of the questions on which the whole table is measured."""
    return s.search(seed=getattr(s, "test_seed", s.seeds[0]))


def measured(spec: Spec, s: Any, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Measure candidates together on one set of questions; returns figures and summaries."""
    settings = held_out_settings(s)
    loaded = loaded_once(s.model, settings.devices.dtype, settings.devices.weight_format)
    if spec.measure == "uniform":
        layers = loaded.model.config.num_layers
        candidates = {f"{factor:g}": LayerFactors.uniform(factor, layers) for factor in s.factors}
    else:
        sets = zip(s.seeds, records, strict=True)
        candidates = {f"LPES (set {seed})": LayerFactors.load(record["folder"] / "factors.json") for seed, record in sets}
    outcomes = held_out(settings, loaded, candidates)
    ours = figures_of(list(outcomes.values()), slots_of(task_of(settings.task), settings.questions.positions))
    if spec.measure == "uniform":
        by_position = np.array([list(ours[name]["acc_by_position"].values()) for name in candidates])
        best = [*by_position.argmax(axis=0), by_position.mean(axis=1).argmax()]
        return {"ours": ours, "best": [list(candidates)[index] for index in best]}
    means = [100 * ours[name]["acc,none"] for name in candidates]
    return {
        "ours": ours,
        "mean": float(np.mean(means)),
        "sample variance": float(np.var(means, ddof=1)) if len(means) > 1 else None,
        "factors": {name: factors.factors.tolist() for name, factors in candidates.items()},
        "fitness": {
            f"seed{seed}": record["factors"]["search"]["fitness_of_best"] for seed, record in zip(s.seeds, records, strict=True)
        },
    }


def in_order_of(seed: int, data: Path, folder: Path) -> Path:
    """A copy of a .jsonl or .jsonl.gz with its lines shuffled by the seed."""
    lines = [line for line in read_text(data).split("\n") if line.strip()]
    random.Random(f"lpes search set {seed}").shuffle(lines)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed{seed}.jsonl"
    write_text(path, "".join(f"{line}\n" for line in lines))
    return path


def about(spec: Spec, s: GridFlags) -> str:
    """The text above the tables."""
    paper = [other_model(spec.paper_model)] if spec.paper_model else []
    return s.describe(" ".join([*([spec.about.format(**vars(s))] if spec.about else []), *paper]))


def tables(spec: Spec, s: GridFlags, summary: Mapping[str, Any]) -> list[str]:
    """The tables in Markdown, from the result of `run` (or of its earlier versions, whose entries are bare figures)."""
    ours = {title: as_entry(value) for title, value in summary.get("ours", summary).items() if title != "refused"}
    heads, beside = [spec.first_column], bool(spec.paper_columns)
    for column in spec.columns:
        positions = list(next(iter(ours.values()))["figures"][0]["acc_by_position"]) if column == "positions" else []
        heads += header("", positions)[1:] if positions else [column]
    rows = []
    for title, row_entry in ours.items():
        cells = [cell for column in spec.columns for cell in shown(row_entry, column)]
        rows.append([title, *cells, *(spec.paper.get(title, ["-"] * len(spec.paper_columns)) if beside else [])])
    if "best" in summary:
        rows.append(["best factor", *summary["best"], "-"])
    rows += [] if beside else [paper_row(title, values) for title, values in spec.paper.items()]
    parts = [summary.get("about") or about(spec, s), markdown_table([*heads, *spec.paper_columns], rows)]
    if "mean" in summary:
        variance = "-" if summary["sample variance"] is None else f"{summary['sample variance']:.3f}"
        totals = [["ours", f"{summary['mean']:.2f}", variance], ["paper", *spec.paper_totals]]
        parts.append(markdown_table(["over the sets", "mean", "sample variance"], totals))
    for first, second, said in spec.tests:
        if p := summary.get(f"p_{first}_against_{second}"):
            parts.append(f"{said}, paired: p {', '.join(map(show_p, p))}.\n")
    return parts + [f"Not run: {name} ({reason}).\n" for name, reason in summary.get("refused", {}).items()]


def as_entry(value: Any) -> dict[str, Any]:
    """A row's entry. Older summaries have the figures of one set, or of each seed, in its place."""
    if isinstance(value, list):
        return {"figures": value}
    return {"figures": [value]} if "metric" in value else value


def shown(row_entry: Mapping[str, Any], column: str) -> list[str]:
    """An entry's cells of a column."""
    if column == "positions":
        return row("", row_entry["figures"])[1:]
    if column == "accuracy (std)":
        return [f"{row_entry['mean']:.1f} (± {row_entry['std']:.2f})"]
    key, form = COLUMNS[column]
    # The gradient scores no individuals.
    nothing = key not in row_entry or (key == "evaluations" and not row_entry[key])
    return ["-" if nothing else f"{row_entry[key]:{form}}"]
