"""Shared code of Tables 2, 3, 4 and 17: columns that are tasks on files, measured for the plain model, PI and LPES.

Factors come from another search and are used unchanged. PI is one factor for all layers, the mean of the found ones (over all
bands, if they are by band). All three are measured on the same questions by `lpes_jax.evaluation.evaluate`, with the
benchmark's own prompt, cut and metric. A prompt that is too long is cut as in the benchmark, to --max-prompt-tokens or to the
model's window minus the tokens to generate, whichever is less.

Files are searched below --data-folder, under the benchmarks' names. A column without a file is listed as missing, and a column
that cannot be measured is listed with the reason. Tasks of a benchmark that the paper omits are measured if they have a file,
but not included in the average.

Each column writes one JSON file and one with the model's outputs; existing ones are not measured again, and `--part i/n`
measures every n-th. A last call without `--part` writes tables.md and summary.json.

Letters: Q questions.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from grid import GridFlags, end_part, in_part, markdown_table, show_p, write_tables
from jaxtyping import Float
from transfer import load_cell

from lpes_jax.errors import UserError
from lpes_jax.evaluation import BASELINE, Candidate, Conditions, Outcome, evaluate, slots_of
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import Loaded, load
from lpes_jax.models.llama.chat import Chat, make_chat
from lpes_jax.results import write_samples
from lpes_jax.statistics import paired_permutation_test
from lpes_jax.store.files import write_json
from lpes_jax.store.provenance import environment
from lpes_jax.tasks import make_task, settings_of
from lpes_jax.tasks.chat import ChatTask
from lpes_jax.tasks.data import content_id
from lpes_jax.tasks.metrics import ROUGE, corpus_rouge
from lpes_jax.tasks.prompts import Split

METHODS = (BASELINE, "pi", "lpes")


@dataclass(frozen=True)
class Benchmark:
    """A column of a table.

    Attributes:
        title: Its header.
        name: The name of its cell.
        files: Glob patterns below --data-folder; the first that matches is used.
        levels: `data` is the folder this many levels above the file.
        split: Replaces --split.
    """

    title: str
    name: str
    task: str
    files: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    in_paper: bool = True
    levels: int = 0
    split: Split | None = None

    def find(self, folder: Path) -> Path | None:
        """Its data; of several files the one highest in the tree, then the first by name."""
        for pattern in self.files:
            if found := sorted(folder.glob(pattern), key=lambda path: (len(path.parts), path)):
                return found[0].parents[self.levels - 1] if self.levels else found[0]
        return None


@dataclass(frozen=True, kw_only=True)
class BenchmarkFlags:
    """Model, factors, files and sizes."""

    factors: Path
    """factors.json of a search on other data."""
    data_folder: Path
    """Folder of the benchmarks' files, at any depth."""
    output_path: Path
    """Folder of the cells, tables.md and summary.json."""
    model: str = "smollm2-135m-instruct"
    """A name in models/zoo, a folder in Hugging Face layout, a .gguf file, or a Hugging Face hub id."""
    columns: tuple[str, ...] = ()
    """Cells to measure, by the names of their files (default: all)."""
    limit: int | None = 100
    """Questions of each column, evenly spaced over the file; a larger number means all."""
    split: Split = "all"
    """all: no search has used these files; test: only the part that a search would not use."""
    max_prompt_tokens: int = 3584
    """Longer prompts are cut as in the benchmark, if it cuts."""
    max_new_tokens: int = 512
    """Tokens to generate, for long answers."""
    apply_chat_template: bool = False
    """Ask in a chat, with the tokenizer's own chat template."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    batch_size: int | None = None
    """Prompts per forward pass (default: chosen from the memory)."""
    part: str = "0/1"
    """i/n: measure only the columns i, i + n, ... (from 0), and write no tables."""


def run_table(
    s: BenchmarkFlags, title: str, benchmarks: Sequence[Benchmark], paper: Mapping[str, Mapping[str, str]], about: str
) -> None:
    """Measure missing columns and write the tables. `paper`: model -> method -> the paper's row as printed, average last."""
    names = [benchmark.name for benchmark in benchmarks]
    if unknown := [name for name in s.columns if name not in names]:
        raise UserError(f"--columns {unknown[0]}: the columns of this table are {', '.join(names)}")
    if s.limit is not None and s.limit < 1:
        raise UserError(f"--limit must be at least 1, got {s.limit}")
    if not s.data_folder.is_dir():
        raise UserError(f"--data-folder {s.data_folder}: no such folder")
    chosen = [benchmark for benchmark in benchmarks if not s.columns or benchmark.name in s.columns]
    files = {benchmark.name: found for benchmark in chosen if (found := benchmark.find(s.data_folder)) is not None}
    if not files:
        patterns = ", ".join(pattern for benchmark in chosen for pattern in benchmark.files)
        raise UserError(f"--data-folder {s.data_folder}: has no file of this table, which needs {patterns}")
    factors = LayerFactors.load(s.factors)
    loaded: Loaded | None = None
    chat: Chat | None = None
    records, failed = {}, {}
    for number, benchmark in enumerate(benchmark for benchmark in chosen if benchmark.name in files):
        data, path = files[benchmark.name], s.output_path / f"{benchmark.name}.json"
        used = _settings(s, benchmark, data, factors)
        if not path.exists() and in_part(number, s.part):
            print(f"== {benchmark.title}: {data}", flush=True)
            if loaded is None:
                loaded = load(s.model, s.dtype)
                config = loaded.model.config
                factors.for_model(config.num_layers, config.num_kv_heads, config.rotary_dim, str(s.factors))
                chat = make_chat(loaded.tokenizer, apply_chat_template=s.apply_chat_template)
            begun = time.time()
            try:
                outcomes = measure(s, benchmark, data, loaded, chat, factors)
            except UserError as error:
                failed[benchmark.name] = str(error)
                continue
            record = {"settings": used, "model": loaded.identity, "seconds": round(time.time() - begun, 1), **environment()}
            s.output_path.mkdir(parents=True, exist_ok=True)
            write_samples(path.with_suffix(".samples.jsonl"), outcomes)
            write_json(path, record | {"methods": _methods(outcomes)})
        if path.exists():
            records[benchmark.name] = load_cell(path, used)
    end_part(s.part)
    _write(s, title, chosen, paper, about, records, files, failed)


def measure(
    s: BenchmarkFlags, benchmark: Benchmark, data: Path, loaded: Loaded, chat: Chat | None, factors: LayerFactors
) -> list[Outcome]:
    """Baseline, PI and LPES on the same questions. Raises UserError as the task and `evaluate`."""
    own = settings_of(benchmark.task)
    limits = {"max_prompt_tokens": s.max_prompt_tokens, "max_new_tokens": s.max_new_tokens}
    limits = {name: value for name, value in limits.items() if name in own}
    task = make_task(benchmark.task, data=data, **benchmark.settings, **limits)
    examples = spread(task.examples(benchmark.split or s.split, None, 0), s.limit)
    if chat is not None:
        task = ChatTask(task, chat.render)
    mean = LayerFactors.uniform(factors.mean, factors.num_layers)
    return evaluate(
        loaded.model,
        loaded.tokenizer,
        task,
        examples,
        slots_of(task, (0,)),
        [Candidate(BASELINE), Candidate("pi", mean), Candidate("lpes", factors)],
        Conditions(task.metrics, stop_ids=loaded.stop_ids, overlength="skip", batch_size=s.batch_size),
    )


def spread(examples: Sequence[Any], limit: int | None) -> list[Any]:
    """`limit` evenly spaced examples: files are ordered by document, so the first examples cover few documents."""
    count = len(examples) if limit is None else min(limit, len(examples))
    return [examples[index * len(examples) // count] for index in range(count)]


def figure(scores: Mapping[str, Float[np.ndarray, "Q"]]) -> float:
    """A benchmark's score in percent: corpus ROUGE (geometric mean of three means), or the first metric's mean."""
    if set(ROUGE) <= scores.keys():
        return 100 * corpus_rouge([{kind: float(scores[kind].mean()) for kind in ROUGE}])
    return 100 * float(next(iter(scores.values())).mean())


def difference(
    ours: Mapping[str, Float[np.ndarray, "Q"]], baseline: Mapping[str, Float[np.ndarray, "Q"]], draws: int = 1000
) -> dict[str, float]:
    """The difference of `figure` in points, ours - baseline: value, standard error by a bootstrap over questions, and p.

    p is the paired permutation test of the first metric's mean; for summaries, of each question's ROUGE.
    """
    metric = next(iter(ours))
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(draws):
        drawn_rows = rng.integers(0, len(ours[metric]), len(ours[metric]))
        drawn.append(
            figure({k: v[drawn_rows] for k, v in ours.items()}) - figure({k: v[drawn_rows] for k, v in baseline.items()})
        )
    return {
        "difference": figure(ours) - figure(baseline),
        "standard_error": float(np.std(drawn)),
        "p": paired_permutation_test(ours[metric][:, None], baseline[metric][:, None]),
    }


def _settings(s: BenchmarkFlags, benchmark: Benchmark, data: Path, factors: LayerFactors) -> dict[str, Any]:
    """Everything that a cell depends on, as JSON."""
    left_out = {"output_path", "part", "batch_size", "columns", "data_folder", "factors"}
    flags = {name: value for name, value in asdict(s).items() if name not in left_out}
    file = {"data": data.name, "bytes": sum(path.stat().st_size for path in [data, *data.rglob("*")] if path.is_file())}
    found = {"factors": content_id(*factors.content)}
    own = {"task": benchmark.task, **benchmark.settings}
    return json.loads(json.dumps(flags | file | found | own, default=str))


def _methods(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        outcome.candidate.name: {
            "scores": {metric: values[:, 0].tolist() for metric, values in outcome.scores.items()},
            "prompt_tokens": float(np.mean(outcome.prompt_tokens)),
            **outcome.counts,
        }
        for outcome in outcomes
    }


def _write(
    s: BenchmarkFlags,
    title: str,
    benchmarks: Sequence[Benchmark],
    paper: Mapping[str, Mapping[str, str]],
    about: str,
    records: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, Path],
    failed: Mapping[str, str],
) -> None:
    ran = [benchmark for benchmark in benchmarks if benchmark.name in records]
    averaged = [benchmark.name for benchmark in ran if benchmark.in_paper]
    scores = {
        benchmark.name: {method: _scores(records[benchmark.name]["methods"][method]) for method in METHODS} for benchmark in ran
    }
    ours = {method: {name: figure(by_method[method]) for name, by_method in scores.items()} for method in METHODS}
    against = {
        method: {name: difference(by_method[method], by_method[BASELINE]) for name, by_method in scores.items()}
        for method in METHODS[1:]
    }
    titles = [benchmark.name for benchmark in benchmarks if benchmark.in_paper]
    theirs = {
        f"{model}, {method}": dict(zip(titles, map(float, printed.split()), strict=False))
        for model, rows in paper.items()
        for method, printed in rows.items()
    }

    def row(name: str, values: Mapping[str, float]) -> list[str]:
        mean = [f"{np.mean([values[name] for name in averaged]):.2f}" if averaged else "-"]
        return [name, *(f"{values[benchmark.name]:.2f}" if benchmark.name in values else "-" for benchmark in ran), *mean]

    rows = [row(method, values) for method, values in ours.items()]
    for method, values in against.items():
        mean = f"{np.mean([values[column]['difference'] for column in averaged]):+.2f}" if averaged else "-"
        cells = [f"{change['difference']:+.2f} ± {change['standard_error']:.2f}" for change in values.values()]
        rows.append([f"{method} - baseline", *cells, mean])
        rows.append([f"p of {method}", *(show_p(change["p"]) for change in values.values()), "-"])
    rows += [row(f"paper: {name}", values) for name, values in theirs.items()]
    without = [f"{benchmark.title} ({benchmark.files[0]})" for benchmark in benchmarks if benchmark.name not in files]
    lists = [
        f"Without data: {', '.join(without) or 'none'}.",
        *(f"Not measured: {title}. {reason}" for title, reason in failed.items()),
    ]
    limit = "all" if s.limit is None else f"at most {s.limit}"
    text = (
        f"Ours: {Path(s.model).name}, factors {s.factors.name} as they were found elsewhere, {limit} questions a column, "
        "spread over the file; ± is the standard error over questions, p the paired permutation test against the baseline, not "
        "corrected for the number of columns. Averages are over the paper's columns that we ran, of the paper's rows "
        f"too.\n\n{about}\n"
    )
    parts = [
        text,
        markdown_table(["", *(benchmark.title for benchmark in ran), "average"], rows),
        _details(ran, files, records),
    ]
    summary = {
        "settings": json.loads(json.dumps(asdict(s), default=str)),
        "ran": [benchmark.name for benchmark in ran],
        "without_data": [benchmark.name for benchmark in benchmarks if benchmark.name not in files],
        "not_measured": dict(failed),
        "ours": ours,
        "against_baseline": against,
        "paper": theirs,
    }
    write_tables(GridFlags(output_path=s.output_path), title, [*parts, "\n\n".join(lists) + "\n"], summary)


def _scores(record: Mapping[str, Any]) -> dict[str, Float[np.ndarray, "Q"]]:
    return {metric: np.array(values, float) for metric, values in record["scores"].items()}


def _details(ran: Sequence[Benchmark], files: Mapping[str, Path], records: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per column: its file and metric, the number of questions, and statistics of prompts and outputs."""
    rows = []
    for benchmark in ran:
        methods = records[benchmark.name]["methods"]
        baseline = methods[BASELINE]
        metric, values = next(iter(baseline["scores"].items()))
        ended = " / ".join(str(methods[method].get("outputs_ended_by_length", "-")) for method in METHODS)
        counts = [f"{baseline['prompt_tokens']:.0f}", str(baseline["prompts_cut"]), str(baseline["questions_skipped"]), ended]
        rows.append([benchmark.title, files[benchmark.name].name, metric, str(len(values)), *counts])
    ended = f"ended by length ({' / '.join(METHODS)})"
    return markdown_table(["column", "file", "metric", "questions", "tokens", "prompts cut", "left out", ended], rows)
