"""Measure factors by the position of the fact, on questions that all candidates share, and record it.

Two metrics. `prefix`: the gold answer, behind an admitted opener, is exactly how the model's greedy output begins; decided
without generating. `substring`: lost-in-the-middle's own, the gold value stands somewhere in 100 generated tokens. Small models
often fail on how an answer begins and not on finding it, so the same model is measured on plain prompts beside the ones
with an opener.

Letters: Q questions, S slots.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama.model import Llama
from lpes_jax.report.tables import Row
from lpes_jax.scoring import Scorer, generate_ids
from lpes_jax.statistics import paired_permutation_test, standard_error
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.metrics import begins_with, substring
from lpes_jax.tasks.prompts import Prompt, Task

PLAIN, BASELINE = "plain prompt", "baseline"
Report = Callable[[int], None]


@dataclass(frozen=True)
class Candidate:
    """Something to measure: factors, or the model as it is; `plain`: on prompts without the forced opener."""

    name: str
    factors: LayerFactors | None = None
    plain: bool = False


@dataclass(frozen=True)
class Outcome:
    """A candidate's results. `outputs`, `substring` and `prefix_of_outputs` (that rule on its ids) come with generation."""

    candidate: Candidate
    prompts: list[Prompt]  # Q x S, question by question
    correct: Bool[np.ndarray, "Q S"]
    log_likelihood: Float[np.ndarray, "Q S"]
    compilations: int
    outputs: list[str] | None = None
    substring: Bool[np.ndarray, "Q S"] | None = None
    prefix_of_outputs: Bool[np.ndarray, "Q S"] | None = None


def slots_of(task: Task, positions: Sequence[int], slots: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """(slot, position in percent) of each place to measure: of `slots`, where they are named, else of `positions`."""
    if slots:
        return [(slot, task_prompts.position(slot, task.num_items)) for slot in slots]
    return [(task_prompts.slot(position, task.num_items), position) for position in positions]


def evaluate(
    model: Llama,
    tokenizer: Any,
    task: Task,
    examples: Sequence[Any],
    places: Sequence[tuple[int, int]],
    candidates: Sequence[Candidate],
    *,
    metrics: Sequence[str] = ("prefix",),
    max_new_tokens: int = 100,
    stop_ids: Sequence[int] = (),
    batch_size: int | None = None,
    on_prompts: Report = lambda count: None,
) -> list[Outcome]:
    """Every candidate on every example with its fact at every place (`slots_of`). `stop_ids` end a generated text."""
    window = model.config.max_position_embeddings
    outcomes = []
    for plain in (True, False):
        chosen = [candidate for candidate in candidates if candidate.plain == plain]
        version_of_task = task.plain if plain else task
        if not chosen or version_of_task is None:
            continue
        prompts = [version_of_task.prompt(example, slot, position) for example in examples for slot, position in places]
        encoded = task_prompts.encode(prompts, tokenizer, window)
        scorer = Scorer(model, encoded, batch_size=batch_size)
        shape = (len(examples), len(places))
        for candidate in chosen:
            factors = candidate.factors or LayerFactors.uniform(1.0, model.config.num_layers)
            scores = scorer(factors.factors[None], factors.granularity, on_prompts)
            outcome = Outcome(
                candidate, prompts, scores.correct.reshape(shape), scores.log_likelihood.reshape(shape), scorer.compilations
            )
            if "substring" in metrics:
                longest = max(len(ids) for prompt in encoded for ids in prompt.answers)
                if max_new_tokens < longest:
                    raise UserError(f"--max-new-tokens {max_new_tokens} is below the longest gold answer, {longest} tokens")
                longest = max(len(prompt.ids) for prompt in encoded)
                if longest + max_new_tokens > window:
                    raise UserError(
                        f"--max-new-tokens {max_new_tokens} behind the longest prompt, {longest} tokens, is more than the "
                        f"model's window of {window}; lower it, or leave substring out of --metrics"
                    )
                ids = generate_ids(
                    model,
                    [prompt.ids for prompt in encoded],
                    factors=factors.factors,
                    granularity=factors.granularity,
                    max_new_tokens=max_new_tokens,
                    stop=stop_ids,
                    batch_size=batch_size,
                )
                outputs = tokenizer.batch_decode(ids, skip_special_tokens=True)
                found = [substring(output, prompt.gold) for output, prompt in zip(outputs, prompts, strict=True)]
                begun = [begins_with(new, prompt.answers) for new, prompt in zip(ids, encoded, strict=True)]
                outcome = replace(
                    outcome,
                    outputs=outputs,
                    substring=np.array(found).reshape(shape),
                    prefix_of_outputs=np.array(begun).reshape(shape),
                )
            outcomes.append(outcome)
    order = {candidate.name: at for at, candidate in enumerate(candidates)}
    return sorted(outcomes, key=lambda outcome: order[outcome.candidate.name])


def rows(outcomes: Sequence[Outcome], metric: str = "prefix") -> list[Row]:
    """The outcomes as table rows, in percent; p is the paired test against the outcome named `baseline`, over questions."""
    of_metric = {outcome.candidate.name: _values(outcome, metric) for outcome in outcomes}
    baseline = of_metric.get(BASELINE)
    return [
        Row(
            name=outcome.candidate.name,
            accuracy=tuple((100 * _values(outcome, metric).mean(axis=0)).tolist()),
            mean=float(100 * _values(outcome, metric).mean()),
            standard_error=100 * standard_error(_values(outcome, metric)),
            p=None
            if baseline is None or outcome.candidate.name in (BASELINE, PLAIN)
            else paired_permutation_test(_values(outcome, metric), baseline),
            log_likelihood=float(outcome.log_likelihood.mean()),
        )
        for outcome in outcomes
    ]


def results_record(
    task: Task, outcomes: Sequence[Outcome], places: Sequence[tuple[int, int]], config: dict[str, Any], started: float
) -> dict[str, Any]:
    """`results.json`: lm-evaluation-harness's layout for the last outcome, and every outcome under `methods`."""
    methods = {outcome.candidate.name: _figures(outcome, places) for outcome in outcomes}
    for name, row in zip(methods, rows(outcomes), strict=True):
        if row.p is not None:
            methods[name]["p_against_baseline,none"] = row.p
    last = outcomes[-1]
    return {
        "results": {task.name: {"alias": task.name, **methods[last.candidate.name]}},
        "methods": methods,
        "n-samples": {task.name: {"original": len(last.correct), "effective": len(last.correct)}},
        "config": config,
        **environment(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "total_evaluation_time_seconds": round(time.time() - started, 3),
    }


def write_samples(path: Path, outcomes: Sequence[Outcome]) -> None:
    """`samples.jsonl`: one line a candidate and prompt. The same run writes the same bytes."""
    with path.with_name(path.name + ".part").open("w", encoding="utf-8") as file:
        for outcome in outcomes:
            for at, prompt in enumerate(outcome.prompts):
                sample: dict[str, Any] = {
                    "method": outcome.candidate.name,
                    "example": prompt.example,
                    "position": prompt.position,
                    "slot": prompt.slot,
                    "prompt_hash": hashlib.sha256(prompt.text.encode()).hexdigest()[:16],
                    "target": prompt.gold,
                    "prefix": bool(outcome.correct.flat[at]),
                    "log_likelihood": _finite(float(outcome.log_likelihood.flat[at]), 4),
                }
                if outcome.outputs is not None and outcome.substring is not None:
                    sample |= {"output": outcome.outputs[at], "substring": bool(outcome.substring.flat[at])}
                file.write(json.dumps(sample, ensure_ascii=False) + "\n")
    path.with_name(path.name + ".part").replace(path)


def environment() -> dict[str, Any]:
    """Versions and devices, for every record."""
    packages = ("lpes-jax", "jax", "jaxlib", "flax", "evosax", "optax", "transformers", "numpy")
    devices = jax.devices()
    return {
        "versions": {package: _version(package) for package in packages},
        "devices": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
    }


def _figures(outcome: Outcome, places: Sequence[tuple[int, int]]) -> dict[str, Any]:
    positions = [str(position) for _, position in places]
    figures: dict[str, Any] = {
        "metric": "prefix",
        "acc,none": float(outcome.correct.mean()),
        "acc_stderr,none": _finite(standard_error(outcome.correct)),
        "acc_by_position": dict(zip(positions, outcome.correct.mean(axis=0).tolist(), strict=True)),
        "log_likelihood_by_position": {
            position: _finite(float(value), 6)
            for position, value in zip(positions, outcome.log_likelihood.mean(axis=0), strict=True)
        },
        "slots": [slot for slot, _ in places],
        "compilations": outcome.compilations,
    }
    if outcome.substring is not None and outcome.prefix_of_outputs is not None:
        figures |= {
            "substring,none": float(outcome.substring.mean()),
            "substring_stderr,none": _finite(standard_error(outcome.substring)),
            "substring_by_position": dict(zip(positions, outcome.substring.mean(axis=0).tolist(), strict=True)),
            "substring_but_not_prefix": int((outcome.substring & ~outcome.correct).sum()),
            "prefix_differs_from_generation": int((outcome.prefix_of_outputs != outcome.correct).sum()),
        }
    return figures


def _values(outcome: Outcome, metric: str) -> np.ndarray:
    if metric == "prefix":
        return outcome.correct
    assert outcome.substring is not None
    return outcome.substring


def _finite(value: float, digits: int | None = None) -> float | None:
    if not math.isfinite(value):
        return None
    return value if digits is None else round(value, digits)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:  # PackageNotFoundError: a source tree on the path, not installed
        return None
