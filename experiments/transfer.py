"""Do factors transfer beyond their search: to other lengths, keys, tasks, plain text, other models?

    python experiments/transfer.py --models smollm2-135m-instruct --factors short=A/factors.json mixed=B/factors.json \\
        --num-pairs 5 10 20 --other-key-lengths 8 --num-sentences 40 --data nq-open-oracle.jsonl.gz --oracle \\
        --documents RETRIEVED.jsonl --documents-split all --text KNOWN.txt OTHER.txt --text-window 512 8192

All factors are measured on the same held-out questions. The table has found - baseline with the paired test for each pair of
factors and target. Factors of a model with another number of layers are resampled: linear interpolation in relative depth, with
the first factor on the first layer and the last on the last. Factors of KV groups or bands need a model with as many groups,
and with frequencies that the bands divide; a pair that does not fit is listed with the reason.

Each model and factors write one JSON file; existing ones are not measured again, and `--part i/n` measures every n-th. A last
call without `--part` writes tables.md and summary.json.

Letters: Q questions, S positions, L layers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from grid import GridFlags, check_same, end_part, in_part, markdown_table, run_script, show_p, write_tables
from jaxtyping import Float

from lpes_jax.errors import UserError
from lpes_jax.evaluate.perplexity import text_nlls
from lpes_jax.evaluation import BASELINE, Candidate, Conditions, Outcome, default_metrics, evaluate, slots_of
from lpes_jax.factors import LayerFactors
from lpes_jax.json_files import read_json
from lpes_jax.models.llama import LlamaConfig, Loaded, load
from lpes_jax.models.llama.model import Llama
from lpes_jax.statistics import paired_permutation_test, standard_error
from lpes_jax.store.files import write_json
from lpes_jax.store.provenance import environment
from lpes_jax.tasks import make_task
from lpes_jax.tasks.perplexity import Perplexity, Window
from lpes_jax.tasks.prompts import Overlength, Split, Task

TEXT = "plain text"  # the beginning of these targets' titles
ORACLE = "mdqa, gold document alone"  # all test questions for any --test-limit, because it has one position
QUARTERS = 4  # columns of a text window, in place of positions


@dataclass(frozen=True, kw_only=True)
class TargetFlags:
    """What to measure on; all of it is held out from searches."""

    num_pairs: tuple[int, ...] = (5, 10, 20)
    """kv: pairs in a prompt, each a target."""
    key_length: int | None = None
    """kv: hexadecimal characters of keys and values (default: UUIDs)."""
    other_key_lengths: tuple[int, ...] = ()
    """kv: more targets, with the first of --num-pairs and keys of other lengths."""
    num_sentences: tuple[int, ...] = ()
    """needle: sentences of filler, each a target."""
    data: Path | None = None
    """mdqa: nq-open-oracle.jsonl.gz, for targets with other questions' documents as distractors."""
    num_documents: tuple[int, ...] = (5,)
    """mdqa: documents in a prompt, each a target."""
    documents: tuple[Path, ...] = ()
    """mdqa: files with their own (retrieved) distractors, each a target with the first of --num-documents."""
    documents_split: Split = "test"
    """Questions of --documents to ask: all, if no search used the file."""
    oracle: bool = False
    """mdqa: one more target, each question of --data with only its gold document."""
    max_new_tokens: int | None = None
    """mdqa: tokens to generate (default: the task's)."""
    text: tuple[Path, ...] = ()
    """Plain texts in UTF-8, each a target; the last 60 % of each are held out."""
    text_window: tuple[int, ...] = (512,)
    """Tokens of a window of text, each a target."""
    text_limit: int = 100
    """Windows of held-out text."""
    test_limit: int = 500
    """Held-out questions of each target, the same for everything that is compared."""
    positions: tuple[int, ...] = (0, 25, 50, 75, 100)
    """Positions of the fact, in percent."""
    overlength: Overlength = "error"
    """What to do with questions too long for the model's window: skip drops them at every position."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    batch_size: int | None = None
    """Prompts per forward pass (default: chosen from the memory)."""
    part: str = "0/1"
    """i/n: run only the cells i, i + n, ... (from 0), and write no tables."""


def targets_of(flags: TargetFlags) -> dict[str, Task]:
    """The tasks to measure on, by title."""
    f = flags
    targets: dict[str, Task] = {
        f"kv, {n} pairs": make_task("kv", num_pairs=n, key_length=f.key_length) for n in dict.fromkeys(f.num_pairs)
    }
    for length in f.other_key_lengths:
        title = f"kv, {f.num_pairs[0]} pairs, keys of {length}"
        targets[title] = make_task("kv", num_pairs=f.num_pairs[0], key_length=length)
    for n in f.num_sentences:
        targets[f"needle, {n} sentences"] = make_task("needle", num_sentences=n)
    if f.data is not None:
        for n in f.num_documents:
            targets[f"mdqa, {n} documents"] = make_task("mdqa", data=f.data, num_documents=n, distractors="random")
        if f.oracle:
            targets[ORACLE] = make_task("mdqa", data=f.data, mode="oracle")
    for path in f.documents:
        targets[f"mdqa, {path.stem}"] = make_task("mdqa", data=path, num_documents=f.num_documents[0])
    return targets


def measure(
    flags: TargetFlags, targets: Mapping[str, Task], loaded: Loaded, candidate: Candidate, model: Llama | None = None
) -> dict[str, Any]:
    """The scores of a candidate on every question of every target, and its nats per token in every window of text.

    `model` replaces the loaded one. Key-value questions and needles use `prefix`, without generation. mdqa has two metrics of
    generated text: the substring of its first line and, as a separate target, F1. A target without plain prompts is skipped for
    a candidate on plain prompts.
    """
    f = flags
    scores: dict[str, Any] = {}
    model = loaded.model if model is None else model
    own_documents = {f"mdqa, {path.stem}" for path in f.documents}
    for title, task in targets.items():
        if candidate.plain and task.plain is None:
            continue
        *_, outcome = evaluate(
            model,
            loaded.tokenizer,
            task,
            task.examples(
                f.documents_split if title in own_documents else "test", None if title == ORACLE else f.test_limit, 0
            ),
            slots_of(task, f.positions if task.num_items > 1 else (0,)),
            [Candidate(BASELINE), candidate] if candidate.plain else [candidate],  # both: they leave out the same questions
            Conditions(
                _metrics(task),
                max_new_tokens=f.max_new_tokens,
                stop_ids=loaded.stop_ids,
                overlength=f.overlength,
                batch_size=f.batch_size,
            ),
        )
        scores[title] = _scores(outcome)
        if "f1" in outcome.scores:
            scores[f"{title}, F1"] = {"metric": "f1", "scores": outcome.scores["f1"].tolist()}
    for title, path, window in text_targets(f):
        if candidate.plain:
            continue
        windows = spaced(Perplexity(data=path, window=window).windows(loaded.tokenizer, "test"), f.text_limit)
        nlls = text_nlls(model, windows, candidate, max(1, 2048 // window) if f.batch_size is None else f.batch_size)
        quarters = [np.array_split(nll[text_window.scored :], QUARTERS) for text_window, nll in zip(windows, nlls, strict=True)]
        scores[title] = {"metric": "nats a token", "scores": [[float(part.mean()) for part in parts] for parts in quarters]}
    return {"targets": scores}


def text_targets(flags: TargetFlags) -> list[tuple[str, Path, int]]:
    """Title, file and window (tokens) of each target of plain text."""
    pairs = [(path, window) for path in flags.text for window in flags.text_window]
    if len(pairs) == 1:
        return [(TEXT, *pairs[0])]
    return [(f"{TEXT}, {path.stem}, windows of {window}", path, window) for path, window in pairs]


def is_text(title: str) -> bool:
    """Whether the target is plain text, measured in nats per token (less is better)."""
    return title.startswith(TEXT)


def spaced(windows: Sequence[Window], most: int) -> list[Window]:
    """At most `most` windows, evenly spaced."""
    return [windows[i] for i in np.linspace(0, len(windows) - 1, min(most, len(windows))).astype(int)]


def compare(ours: Float[np.ndarray, "Q S"], baseline: Float[np.ndarray, "Q S"]) -> dict[str, Any]:
    """Ours - baseline over the same questions: mean, standard error, p of the paired permutation test, by position."""
    difference = ours - baseline
    return {
        "baseline": float(baseline.mean()),
        "found": float(ours.mean()),
        "difference": float(difference.mean()),
        "standard_error": standard_error(difference) if len(difference) > 1 else None,
        "p": paired_permutation_test(ours, baseline),
        "by_position": difference.mean(axis=0).tolist(),
    }


def resampled(factors: LayerFactors, num_layers: int) -> LayerFactors:
    """Factors and gains at another depth: for each unit, a line through the points (l / (L - 1), number of layer l)."""
    if factors.num_layers == num_layers:
        return factors
    old_depths, new_depths = np.linspace(0, 1, factors.num_layers), np.linspace(0, 1, num_layers)

    def interpolated(numbers: np.ndarray) -> np.ndarray:
        units = numbers.reshape(factors.num_layers, -1).T
        new = np.stack([np.interp(new_depths, old_depths, unit) for unit in units], axis=1)
        return new.reshape(num_layers, *numbers.shape[1:])

    gains = None if factors.gains is None else interpolated(factors.gains)
    return replace(factors, factors=interpolated(factors.factors), gains=gains, curve=None)


def fitted(factors: LayerFactors, config: LlamaConfig, where: str) -> LayerFactors:
    """The factors, adapted to a model of `config`. Raises UserError if KV groups or bands do not fit."""
    layers = config.num_layers
    return resampled(factors, layers).for_model(layers, config.num_kv_heads, config.rotary_dim, where)


def load_cell(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a finished cell. Raises UserError if its settings differ."""
    record = read_json(path)
    check_same(path, record["settings"], settings)
    return record


def settings_record(flags: TargetFlags, *which: str) -> dict[str, Any]:
    """The flags as JSON, without those that say where and how to run, and those that name the cells (`which`)."""
    left_out = {"output_path", "part", "batch_size", *which}
    return json.loads(json.dumps({k: v for k, v in asdict(flags).items() if k not in left_out}, default=str))


def show(figures: Mapping[str, Any], title: str) -> list[str]:
    """Baseline, found, difference with its standard error, p: in points, or for plain text in nats per token."""
    scale, digits = (1, 4) if is_text(title) else (100, 1)
    baseline, found, difference = (scale * figures[name] for name in ("baseline", "found", "difference"))
    error = "" if figures["standard_error"] is None else f" ± {scale * figures['standard_error']:.{digits}f}"
    return [f"{baseline:.{digits}f}", f"{found:.{digits}f}", f"{difference:+.{digits}f}{error}", show_p(figures["p"])]


@dataclass(frozen=True, kw_only=True)
class Settings(TargetFlags):
    """Which factors, on which models."""

    factors: tuple[str, ...]
    """NAME=PATH of each factors.json."""
    models: tuple[str, ...] = ("smollm2-135m-instruct",)
    """Names in models/zoo, folders in Hugging Face layout, .gguf files, or Hugging Face hub ids."""
    output_path: Path = Path("runs/transfer")
    """Folder of the cells, tables.md and summary.json."""


def main(s: Settings) -> None:
    """Measure missing cells and write the table."""
    found = dict(_named(s.factors))
    used, targets = settings_record(s, "factors", "models"), targets_of(s)
    paths = {
        (model, name): s.output_path / f"{Path(model).name}_{name}.json" for model in s.models for name in (BASELINE, *found)
    }
    if len(set(paths.values())) < len(paths):
        raise UserError("--models: two have the same file name; give their folders other names")
    loaded: Loaded | None = None
    for number, ((model, name), path) in enumerate(paths.items()):
        if not in_part(number, s.part) or path.exists():
            continue
        print(f"== {name} on {model}", flush=True)
        if loaded is None or loaded.identity["name"] != model:
            loaded = load(model, s.dtype)
        record: dict[str, Any] = {"settings": used, "model": loaded.identity, "factors": None, "note": "", **environment()}
        try:
            factors = None
            if name != BASELINE:
                factors = fitted(found[name], loaded.model.config, name)
                if factors.num_layers != found[name].num_layers:
                    record["note"] = f"resampled from {found[name].num_layers} layers"
                record["factors"] = factors.factors.tolist()
                if factors.gains is not None:
                    record["gains"] = factors.gains.tolist()
        except UserError as error:
            record |= {"targets": {}, "note": f"not measured: {error}"}
        else:
            record |= measure(s, targets, loaded, Candidate(name, factors))
        s.output_path.mkdir(parents=True, exist_ok=True)
        write_json(path, record)
    end_part(s.part)
    records = {cell: load_cell(path, used) for cell, path in paths.items()}
    _check_factors(records, found)
    rows, summary = [], []
    for (model, name), record in records.items():
        if name == BASELINE:
            continue
        if not record["targets"]:
            rows.append([name, Path(model).name, record["note"], *["-"] * 5])
        for title, ours in record["targets"].items():
            baseline = records[model, BASELINE]["targets"][title]
            figures = compare(np.array(ours["scores"], float), np.array(baseline["scores"], float))
            scale, digits = (1, 3) if is_text(title) else (100, 1)
            by_position = " ".join(f"{scale * value:+.{digits}f}" for value in figures["by_position"])
            target = f"{title} ({record['note']})" if record["note"] else title
            rows.append([name, Path(model).name, target, *show(figures, title), by_position])
            summary.append({"factors": name, "model": model, "target": title, "note": record["note"], **figures})
    header = ["factors", "model", "target", "baseline", "found", "found - baseline", "p", "by position"]
    about = (
        f"{s.test_limit} held-out questions a target; accuracy in percent (kv and needle: prefix; mdqa: substring of generated "
        f"text, and F1), differences in points, at positions {' '.join(map(str, s.positions))} %; text in nats a token, by "
        "quarter of the window, where less is better. p: paired permutation over questions (windows of text), not corrected "
        "for the number of rows.\n"
    )
    write_tables(
        GridFlags(output_path=s.output_path),
        "Transfer of found factors",
        [about, markdown_table(header, rows)],
        {"settings": used, "pairs": summary},
    )


def _metrics(task: Task) -> tuple[str, ...]:
    if task.name != "mdqa":
        return ("prefix",)
    return (*default_metrics(task)[:1], *(metric for metric in task.metrics if metric == "f1"))


def _scores(outcome: Outcome) -> dict[str, Any]:
    record = {"metric": outcome.metric, "scores": outcome.main.tolist()}
    if outcome.log_likelihood is not None:
        record["log_likelihood"] = float(outcome.log_likelihood.mean())
    return record


def _named(factors: Sequence[str]) -> Iterator[tuple[str, LayerFactors]]:
    seen = {BASELINE}
    for entry in factors:
        name, equals, path = entry.partition("=")
        if not equals or not name or "/" in name:
            raise UserError(f"--factors {entry!r}: give NAME=PATH, a name for the table and the factors.json of a search")
        if name in seen:
            raise UserError(f"--factors: the name {name!r} is repeated, or is the baseline's; give another")
        seen.add(name)
        yield name, LayerFactors.load(path)


def _check_factors(records: Mapping[tuple[str, str], Mapping[str, Any]], found: Mapping[str, LayerFactors]) -> None:
    """Raise UserError if other factors were measured under a name in the folder."""
    for (_, name), record in records.items():
        if name != BASELINE and record["factors"] is not None:
            now = resampled(found[name], len(record["factors"]))
            same = np.array_equal(now.factors, np.array(record["factors"]))
            if now.gains is not None or "gains" in record:
                same = same and now.gains is not None and np.array_equal(now.gains, np.array(record.get("gains")))
            if not same:
                raise UserError(f"--factors {name}: other factors were measured under this name; give it another name")


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
