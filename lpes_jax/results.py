"""Records of outcomes: results.json, samples.jsonl, table rows, and the conversion of outcomes to JSON and back.

Letters: Q questions, S slots.
"""

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from lpes_jax.compilation import compilations
from lpes_jax.evaluation import BASELINE, PLAIN, Candidate, Outcome
from lpes_jax.report.tables import TableRow
from lpes_jax.statistics import (
    bootstrap_intervals,
    holm,
    mcnemar,
    paired_permutation_test,
    standard_error,
    wilson_interval,
)
from lpes_jax.store.content import content_sha256
from lpes_jax.store.files import replacing
from lpes_jax.store.provenance import environment
from lpes_jax.tasks.metrics import ROUGE, corpus_rouge
from lpes_jax.tasks.prompts import Task, prompts_sha256

_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
_PLAIN = ("compilations", "prompt_tokens", "counts", "outputs", "output_tokens")  # fields of an Outcome that are JSON already


def rows(outcomes: Sequence[Outcome], metric: str | None = None) -> list[TableRow]:
    """The outcomes as table rows, in percent. p is the paired test over questions against the outcome named `baseline`.

    `metric`: None means the first.
    """
    values_by_name = {outcome.candidate.name: outcome.scores[metric or outcome.metric] for outcome in outcomes}
    baseline = values_by_name.get(BASELINE)
    return [
        TableRow(
            name=name,
            accuracy=tuple((100 * values.mean(axis=0)).tolist()),
            mean=float(100 * values.mean()),
            standard_error=100 * standard_error(values),
            p=None if baseline is None or name in (BASELINE, PLAIN) else paired_permutation_test(values, baseline),
            log_likelihood=None if outcome.log_likelihood is None else float(outcome.log_likelihood.mean()),
        )
        for outcome, (name, values) in zip(outcomes, values_by_name.items(), strict=True)
    ]


def results_record(
    task: Task, outcomes: Sequence[Outcome], slots: Sequence[tuple[int, int]], config: dict[str, Any], started: float
) -> dict[str, Any]:
    """The contents of `results.json`: the last outcome in lm-evaluation-harness's layout, and all outcomes as `methods`.

    Args:
        task: The task.
        outcomes: The outcomes.
        slots: The slots of the fact, as (slot, position).
        config: The settings, with the path of the task's file, if any, as `data`, and `model_identity`.
        started: The run's start, in seconds as in `time.time`.
    """
    methods, last = figures_of(outcomes, slots), outcomes[-1]
    left_out = last.counts["questions_skipped"] + last.counts.get("questions_dropped", 0)
    return {
        "results": {task.name: {"alias": task.name, **methods[last.candidate.name]}},
        "methods": methods,
        "n-samples": {task.name: {"original": len(last.main) + left_out, "effective": len(last.main)}},
        "prompts_sha256": prompts_sha256(last.prompts),
        **run_record(config, started),
    }


def run_record(config: dict[str, Any], started: float) -> dict[str, Any]:
    """What `results.json` says of the run: settings, hash of the data, environment, date, duration and compilations.

    Args:
        config: The settings, as in `results_record`.
        started: The run's start, in seconds as in `time.time`.
    """
    return {
        "config": config,
        "data_sha256": None if config.get("data") is None else content_sha256(Path(config["data"])),
        **environment(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "total_evaluation_time_seconds": round(time.time() - started, 3),
        "compilations": compilations(since=started),
    }


def figures_of(outcomes: Sequence[Outcome], slots: Sequence[tuple[int, int]]) -> dict[str, dict[str, Any]]:
    """The figures of each candidate, by its name, with the first metric's difference from the baseline (`against_baseline`).

    p is from the paired permutation test over questions; p_holm is Holm's correction for all candidates. Intervals (95 %) are
    paired bootstraps over questions. McNemar's exact p is per position, because positions share their questions.
    """
    methods = {outcome.candidate.name: _figures(outcome, slots) for outcome in outcomes}
    p_values = [row.p for row in rows(outcomes)]
    baseline = next((outcome.main for outcome in outcomes if outcome.candidate.name == BASELINE), None)
    for outcome, figures, p, p_holm in zip(outcomes, methods.values(), p_values, holm(p_values), strict=True):
        if p is None or baseline is None:
            continue
        difference = outcome.main - baseline
        *by_position, mean_interval = bootstrap_intervals(difference).tolist()
        figures["p_against_baseline,none"] = p
        figures["against_baseline"] = {
            "difference": float(difference.mean()),
            "interval": mean_interval,
            "p": p,
            "p_holm": p_holm,
            "by_position": {
                str(position): {
                    "difference": float(difference[:, index].mean()),
                    "interval": interval,
                    "p_mcnemar": mcnemar(outcome.main[:, index], baseline[:, index])
                    if _are_verdicts(outcome.main) and _are_verdicts(baseline)
                    else None,
                }
                for index, ((_, position), interval) in enumerate(zip(slots, by_position, strict=True))
            },
        }
    return methods


def json_line(record: dict[str, Any]) -> str:
    """A record as one line of JSON. Unicode's line ends in texts are escaped, so every reader finds one line."""
    return json.dumps(record, ensure_ascii=False).translate(_LINE_ENDS) + "\n"


def write_samples(path: Path, outcomes: Sequence[Outcome], tasks: Sequence[str] = ()) -> None:
    """Write `samples.jsonl`: one line per candidate and prompt, equal bytes for equal runs. `tasks`: each outcome's task."""
    with replacing(path) as part, part.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for number, outcome in enumerate(outcomes):
            for index, prompt in enumerate(outcome.prompts):
                sample: dict[str, Any] = ({"task": tasks[number]} if tasks else {}) | {
                    "method": outcome.candidate.name,
                    "example": prompt.example,
                    "position": prompt.position,
                    "slot": prompt.slot,
                    "prompt_hash": hashlib.sha256(prompt.text.encode()).hexdigest()[:16],
                    "prompt_tokens": outcome.prompt_tokens[index],
                    "prompt_cut": prompt.was_cut,
                    "target": list(prompt.references) if prompt.golds else prompt.gold,
                    **{metric: _short(float(values.flat[index])) for metric, values in outcome.scores.items()},
                }
                if outcome.log_likelihood is not None:
                    sample["log_likelihood"] = _finite(float(outcome.log_likelihood.flat[index]), 4)
                if outcome.outputs is not None and outcome.output_tokens is not None:
                    output = outcome.outputs[index]
                    sample |= {"output": output, "output_tokens": outcome.output_tokens[index], "empty": not output.strip()}
                if prompt.faults:
                    sample["faults"] = list(prompt.faults)
                if prompt.details:
                    sample["details"] = dict(prompt.details)
                file.write(json_line(sample))


def _figures(outcome: Outcome, slots: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The figures of one outcome: the first metric as `acc`, and every metric by its own name."""
    positions = [str(position) for _, position in slots]

    def by_position(values: np.ndarray, digits: int | None = None) -> dict[str, float | None]:
        return {p: _finite(float(v), digits) for p, v in zip(positions, values.mean(axis=0), strict=True)}

    figures: dict[str, Any] = {
        "metric": outcome.metric,
        "acc,none": float(outcome.main.mean()),
        "acc_stderr,none": _finite(standard_error(outcome.main)),
        "acc_by_position": by_position(outcome.main),
        "acc_stderr_by_position": {p: _finite(standard_error(v)) for p, v in zip(positions, outcome.main.T, strict=True)},
        "acc_interval_by_position": dict(zip(positions, _intervals(outcome.main), strict=True)),
    }
    if outcome.log_likelihood is not None:
        figures["log_likelihood_by_position"] = by_position(outcome.log_likelihood, 6)
    figures |= {"slots": [slot for slot, _ in slots], "compilations": outcome.compilations, **outcome.counts}
    for metric, values in outcome.scores.items():
        figures |= {
            f"{metric},none": float(values.mean()),
            f"{metric}_stderr,none": _finite(standard_error(values)),
            f"{metric}_by_position": by_position(values),
        }
    if set(ROUGE) <= outcome.scores.keys():
        each = [{kind: float(outcome.scores[kind].flat[index]) for kind in ROUGE} for index in range(outcome.main.size)]
        figures["rouge_corpus,none"] = corpus_rouge(each)
    if outcome.prefix_of_outputs is not None and "prefix" in outcome.scores:
        prefix = outcome.scores["prefix"] > 0
        figures["prefix_differs_from_generation"] = int((outcome.prefix_of_outputs != prefix).sum())
        for metric in outcome.scores.keys() - {"prefix"}:
            figures[f"{metric}_but_not_prefix"] = int(((outcome.scores[metric] > 0) & ~prefix).sum())
    return figures


def _intervals(values: Float[np.ndarray, "Q S"]) -> list[list[float]]:
    """95 % intervals of the mean at each position: Wilson's for verdicts, otherwise a bootstrap."""
    if _are_verdicts(values):
        return [list(wilson_interval(float(column.sum()), len(values))) for column in values.T]
    return bootstrap_intervals(values)[:-1].tolist()


def _are_verdicts(values: Float[np.ndarray, "Q S"]) -> bool:
    return bool(np.isin(values, (0, 1)).all())


def _short(value: float) -> float | bool:
    """Verdicts as true and false; other scores with six digits."""
    return bool(value) if value in (0.0, 1.0) else round(value, 6)


def _finite(value: float, digits: int | None = None) -> float | None:
    if not math.isfinite(value):
        return None
    return value if digits is None else round(value, digits)


def record_of(outcome: Outcome) -> dict[str, Any]:
    """An outcome as a JSON object, without its candidate and its prompts."""
    likelihood, has_prefix = outcome.log_likelihood, outcome.prefix_of_outputs
    return {
        "scores": {metric: values.tolist() for metric, values in outcome.scores.items()},
        "log_likelihood": None if likelihood is None else [[str(value) for value in row] for row in likelihood],  # may be -inf
        "prefix_of_outputs": None if has_prefix is None else has_prefix.tolist(),
        **{name: getattr(outcome, name) for name in _PLAIN},
    }


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    """The outcome of a record. `evaluate` adds its candidate and prompts.

    Raises:
        KeyError, TypeError, ValueError: The record is damaged.
    """
    likelihood, has_prefix = record["log_likelihood"], record["prefix_of_outputs"]
    scores = {metric: np.array(values, np.float64) for metric, values in record["scores"].items()}
    found = [*scores.values()]
    found += [] if likelihood is None else [np.array(likelihood, np.float32)]
    found += [] if has_prefix is None else [np.array(has_prefix, bool)]
    outputs, tokens, prompt_tokens = (record[name] for name in ("outputs", "output_tokens", "prompt_tokens"))
    if not scores or any(values.shape != found[0].shape or values.ndim != 2 for values in found):
        raise ValueError("scores of different shapes")
    if any(len(values) != found[0].size for values in (outputs, tokens, prompt_tokens) if values is not None):
        raise ValueError("the numbers of outputs and scores differ")
    if not all(isinstance(output, str) for output in outputs or ()):
        raise TypeError("outputs that are not texts")
    if not all(isinstance(count, int) for count in [record["compilations"], *record["counts"].values()]):
        raise TypeError("counts that are not numbers")
    return Outcome(
        Candidate(""),
        [],
        scores,
        None if likelihood is None else np.array(likelihood, np.float32),
        prefix_of_outputs=None if has_prefix is None else np.array(has_prefix, bool),
        **{name: record[name] for name in _PLAIN},
    )
