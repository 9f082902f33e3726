"""Measure factors by the position of the fact, on questions that all candidates share, and record it.

`prefix`: the gold answer, behind an admitted opener, is exactly how the model's greedy output begins; decided without
generating. Every other metric is a task's own (`task.metrics`): of generated text, or of the likeliest option. Small models
often fail on how an answer begins and not on finding it, so the same model is measured on plain prompts beside the ones
with an opener.

Counts that `results.json` has of each candidate (`COUNTS`), of questions, prompts and outputs:

    questions_skipped                   too long for the window, and left out (`--overlength skip`)
    questions_gold_empty                a gold answer is empty by the metric's own normalisation (`lpes_jax.tasks.leaks`)
    questions_answer_in_distractors     what stands beside the fact holds the answer too (there)
    questions_dropped                   of these two, left out (`--drop-leaky`)
    prompts_cut                         shortened as the benchmark does it
    outputs_empty                       nothing but white space was generated
    outputs_ended_by_length             all tokens that were allowed were generated
    outputs_with_unknown_ids            with an id that the tokenizer has not
    verdicts_changed_alone              see below

The first four are those of all questions that were asked for; a search has the same of its own questions as
`selection.search_questions`.

In 16 bits a verdict can hang on how a batch is shaped: two tokens nearly as likely as each other change places. How many do is
counted on the first prompts, which are scored once more, each alone (`verdicts_changed_alone`; not of methods, each of which
would have to be compiled again).

Letters: Q questions, S slots.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from lpes_jax.compilation import compilations
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.finite import not_finite
from lpes_jax.generation import generate_ids
from lpes_jax.methods import Maker
from lpes_jax.models.llama.model import Llama
from lpes_jax.report.tables import Row
from lpes_jax.scoring import OptionScorer, Scorer
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
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.leaks import count_leaky
from lpes_jax.tasks.metrics import ROUGE, begins_with, corpus_rouge
from lpes_jax.tasks.prompts import EncodedPrompt, Overlength, Prompt, Task, prompts_sha256

PLAIN, BASELINE = "plain prompt", "baseline"
COUNTS = (
    *("questions_skipped", "questions_gold_empty", "questions_answer_in_distractors", "questions_dropped", "prompts_cut"),
    *("outputs_empty", "outputs_ended_by_length", "outputs_with_unknown_ids", "verdicts_changed_alone"),
)
ALONE = 32  # prompts that are scored alone as well
Report = Callable[[int], None]
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


@dataclass(frozen=True)
class Candidate:
    """Something to measure: factors, a method (`lpes_jax.methods`), or the model as it is.

    `plain`: on prompts without the forced opener.
    """

    name: str
    factors: LayerFactors | None = None
    plain: bool = False
    method: Maker | None = None


@dataclass(frozen=True)
class Outcome:
    """A candidate's results. `scores`: of each metric in [0, 1], in the order asked for; the first one is in the pictures.

    `log_likelihood` of the gold answers comes with `prefix` (and with options), `outputs` with what is generated; `counts` say
    what happened to prompts and outputs (`COUNTS`).
    """

    candidate: Candidate
    prompts: list[Prompt]  # Q x S, question by question
    scores: dict[str, Float[np.ndarray, "Q S"]]
    log_likelihood: Float[np.ndarray, "Q S"] | None
    compilations: int
    prompt_tokens: list[int]
    counts: dict[str, int]
    outputs: list[str] | None = None
    output_tokens: list[int] | None = None
    prefix_of_outputs: Bool[np.ndarray, "Q S"] | None = None

    @property
    def metric(self) -> str:
        return next(iter(self.scores))

    @property
    def main(self) -> Float[np.ndarray, "Q S"]:
        return self.scores[self.metric]


def default_metrics(task: Task) -> tuple[str, ...]:
    """The task's own, and `prefix` before them where an answer is forced to begin (key-value retrieval)."""
    return ("prefix", *task.metrics) if task.name == "kv" else task.metrics


def slots_of(task: Task, positions: Sequence[int], slots: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """(slot, position in percent) of each place to measure: of `slots`, where they are named, else of `positions`.

    Raises UserError for a slot or position that is not there, one that is named twice, and two slots at one position: results
    go by position.
    """
    if not slots:
        task_prompts.check_positions(positions)
        return [(task_prompts.slot(position, task.num_items), position) for position in positions]
    task_prompts.check_once(slots, "--slots")
    places = [(slot, task_prompts.position(slot, task.num_items)) for slot in slots]
    by_position: dict[int, int] = {}
    for slot, position in places:
        if (other := by_position.setdefault(position, slot)) != slot:
            raise UserError(
                f"--slots {other} and {slot} of {task.num_items} both stand at {position} %, and results go by position; "
                "give slots that are further apart, or one of them"
            )
    return places


def evaluate(
    model: Llama,
    tokenizer: Any,
    task: Task,
    examples: Sequence[Any],
    places: Sequence[tuple[int, int]],
    candidates: Sequence[Candidate],
    *,
    metrics: Sequence[str] = ("prefix",),
    max_new_tokens: int | None = None,
    stop_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    overlength: Overlength = "error",
    drop_leaky: bool = False,
    batch_size: int | None = None,
    on_prompts: Report = lambda count: None,
    measured: dict[Any, Outcome] | None = None,
    earlier: Mapping[str, Outcome] = MappingProxyType({}),
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Every candidate on every example with its fact at every place (`slots_of`).

    `measured`: outcomes of earlier calls with the same model, by what was asked and the factors; those that come are added. The
    same factors are measured once. `earlier`: the same by candidates' names, of a call that was cut off; `on_outcome` gets each
    new one as it comes.

    Raises UserError for a metric that the task has not, for prompts that are too long (`overlength`: or leaves their questions
    out), for fewer new tokens than the longest gold answer has, and where logits are not finite. `drop_leaky` is
    `lpes_jax.tasks.leaks.count_leaky`'s.
    """
    known = ("prefix", *task.metrics) if task.decided_by == "generation" else task.metrics
    if unknown := [metric for metric in metrics if metric not in known]:
        raise UserError(f"--metrics {unknown[0]}: --task {task.name} has {', '.join(known)}")
    new_tokens = task.max_new_tokens if max_new_tokens is None else max_new_tokens
    generates = task.decided_by == "generation" and any(metric != "prefix" for metric in metrics)
    measure = _Measure(model, tokenizer, metrics, new_tokens if generates else 0, stop_ids, stop, batch_size, on_prompts)
    fitted = {
        plain: measure.fit(version, examples, places, overlength, drop_leaky)
        for plain, version in ((True, task.plain), (False, task))
        if version is not None and any(candidate.plain == plain for candidate in candidates)
    }
    left_out = {example for fit, _ in fitted.values() for example in fit.skipped}
    measured, outcomes = {} if measured is None else measured, []
    for plain, (fit, counts) in fitted.items():
        version = task.plain if plain else task
        assert version is not None
        prompts = [prompt for prompt in fit.prompts if prompt.example not in left_out]
        if not prompts:
            raise UserError(f"--overlength skip leaves out all {len(examples)} questions; use fewer items a prompt")
        counts |= {"questions_skipped": len(left_out), "prompts_cut": sum(prompt.was_cut for prompt in prompts)}
        asked = (
            version,
            tuple(places),
            prompts_sha256(prompts),
            tuple(metrics),
            measure.new_tokens,
            tuple(stop_ids),
            tuple(stop),
        )
        of_key: dict[Any, Candidate] = {}
        chosen = [
            (candidate, (asked, _key(candidate, model.config.num_layers)))
            for candidate in candidates
            if candidate.plain == plain
        ]
        for candidate, key in chosen:
            if candidate.name in earlier:
                before = earlier[candidate.name]
                if before.main.shape != (len(prompts) // len(places), len(places)) or before.scores.keys() != set(metrics):
                    raise UserError(
                        f"--resume: what was measured of {candidate.name} is of other questions or metrics; give another "
                        "--output-path"
                    )
                measured[key] = before
            if key in measured or key in of_key:
                on_prompts(len(prompts))
            else:
                of_key[key] = candidate
        if of_key:
            new = measure.outcomes(version, prompts, len(places), list(of_key.values()), counts)
            for key, outcome in zip(of_key, new, strict=True):
                on_outcome(outcome)
                measured[key] = replace(outcome, prompts=[])
        outcomes += [
            replace(measured[key], candidate=candidate, prompts=prompts, counts=measured[key].counts | counts)
            for candidate, key in chosen
        ]
    order = {candidate.name: at for at, candidate in enumerate(candidates)}
    return sorted(outcomes, key=lambda outcome: order[outcome.candidate.name])


def _key(candidate: Candidate, num_layers: int) -> Any:
    """What decides a candidate's outcome on given prompts."""
    if candidate.method is not None:
        return candidate.method
    return (candidate.factors or LayerFactors.uniform(1.0, num_layers)).key


@dataclass(frozen=True)
class _Measure:
    """What is the same for all candidates. `new_tokens` is 0 where nothing is generated."""

    model: Llama
    tokenizer: Any
    metrics: Sequence[str]
    new_tokens: int
    stop_ids: Sequence[int]
    stop: Sequence[str]
    batch_size: int | None
    on_prompts: Report

    def fit(
        self, task: Task, examples: Sequence[Any], places: Sequence[tuple[int, int]], overlength: Overlength, drop_leaky: bool
    ) -> tuple[task_prompts.Fitted, dict[str, int]]:
        """The prompts that fit, and the counts of leaky questions."""
        prompts = [task.prompt(example, slot, position) for example in examples for slot, position in places]
        prompts, counts = count_leaky(prompts, drop_leaky)
        window = self.model.config.max_position_embeddings
        fitted = task_prompts.fit(
            prompts,
            self.tokenizer,
            window,
            max_prompt_tokens=task.max_prompt_tokens,
            new_tokens=self.new_tokens,
            overlength=overlength,
        )
        return fitted, counts

    def outcomes(
        self, task: Task, prompts: list[Prompt], num_places: int, candidates: Sequence[Candidate], counts: dict[str, int]
    ) -> Iterator[Outcome]:
        window, shape = self.model.config.max_position_embeddings, (len(prompts) // num_places, num_places)
        encoded = task_prompts.encode(prompts, self.tokenizer, window)
        verdicts, alone = None, None
        count = len(candidates)
        half = self.model.embed[...].dtype.itemsize < 4
        if task.decided_by == "options":
            verdicts = OptionScorer(self.model, self.tokenizer, prompts, batch_size=self.batch_size, individuals=count)
            alone = OptionScorer(self.model, self.tokenizer, prompts[:ALONE], batch_size=1, individuals=count) if half else None
        elif "prefix" in self.metrics:
            if not task_prompts.short_answers(prompts):
                raise UserError(f"--metrics prefix: --task {task.name} has no short answers that an output could begin with")
            verdicts = Scorer(self.model, encoded, batch_size=self.batch_size, individuals=count)
            alone = Scorer(self.model, encoded[:ALONE], batch_size=1, individuals=count) if half else None
        if self.new_tokens:
            longest = max((len(ids) for prompt in encoded for ids in prompt.answers), default=0)
            if self.new_tokens < longest:
                raise UserError(f"--max-new-tokens {self.new_tokens} is below the longest gold answer, {longest} tokens")
        for candidate in candidates:
            factors = candidate.factors or LayerFactors.uniform(1.0, self.model.config.num_layers)
            scores: dict[str, np.ndarray] = {}
            log_likelihood = None
            changed: dict[str, int] = {}
            if verdicts is not None:
                correct, log_likelihood = self._verdicts(verdicts, candidate, factors, self.on_prompts)
                scores["prefix" if task.decided_by == "generation" else task.metrics[0]] = correct.astype(float).reshape(shape)
                if alone is not None and candidate.method is None:
                    correct_alone, _ = self._verdicts(alone, candidate, factors, lambda count: None)
                    changed["verdicts_changed_alone"] = int((correct_alone != correct[:ALONE]).sum())
            outcome = Outcome(
                candidate,
                prompts,
                scores,
                None if log_likelihood is None else log_likelihood.reshape(shape),
                0 if verdicts is None else verdicts.compilations,
                [len(prompt.ids) for prompt in encoded],
                counts | changed,
            )
            if self.new_tokens:
                outcome = self._generated(outcome, task, encoded, factors, shape)
            yield replace(outcome, scores={metric: outcome.scores[metric] for metric in self.metrics})

    def _verdicts(
        self, scorer: Scorer | OptionScorer, candidate: Candidate, factors: LayerFactors, on_prompts: Report
    ) -> tuple[Bool[np.ndarray, "N"], Float[np.ndarray, "N"]]:
        if candidate.method is None:
            correct, log_likelihood = scorer(
                factors.factors[None],
                factors.granularity,
                on_prompts,
                gains=None if factors.gains is None else factors.gains[None],
                gains_granularity=factors.gains_granularity or "layer",
            )
        else:
            method = candidate.method(self.model.config, scorer.longest)
            correct, log_likelihood = scorer.of_method(method, on_prompts)
        if len(bad := np.flatnonzero(~np.isfinite(log_likelihood[0]))):
            texts, method = scorer.sequences(int(bad[0])), candidate.method is not None
            raise not_finite(self.model, texts, factors, name=candidate.name, method=method)
        return correct[0], log_likelihood[0]

    def _generated(
        self, outcome: Outcome, task: Task, encoded: Sequence[EncodedPrompt], factors: LayerFactors, shape: tuple[int, int]
    ) -> Outcome:
        report = self.on_prompts if "prefix" not in self.metrics else lambda count: None  # each prompt counts once
        ids = generate_ids(
            self.model,
            [prompt.ids for prompt in encoded],
            factors=factors,
            make_method=None if outcome.candidate.method is None else partial(outcome.candidate.method, self.model.config),
            max_new_tokens=self.new_tokens,
            stop=self.stop_ids,
            batch_size=self.batch_size,
            on_prompts=report,
            name=outcome.candidate.name,
        )
        outputs = [
            task_prompts.before_stop(output, (*task.stop, *self.stop))
            for output in self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        ]
        scored = [task.score(output, prompt) for output, prompt in zip(outputs, outcome.prompts, strict=True)]
        own = {metric: np.array([score[metric] for score in scored]).reshape(shape) for metric in task.metrics}
        begun = [begins_with(new, prompt.answers) for new, prompt in zip(ids, encoded, strict=True)]
        counts = {
            "outputs_empty": sum(not output.strip() for output in outputs),
            "outputs_ended_by_length": sum(len(new) == self.new_tokens for new in ids),
            "outputs_with_unknown_ids": sum(max(new, default=0) >= len(self.tokenizer) for new in ids),
        }
        return replace(
            outcome,
            scores=outcome.scores | own,
            outputs=outputs,
            output_tokens=[len(new) for new in ids],
            prefix_of_outputs=np.array(begun).reshape(shape) if "prefix" in self.metrics else None,
            counts=outcome.counts | counts,
        )


def rows(outcomes: Sequence[Outcome], metric: str | None = None) -> list[Row]:
    """The outcomes as table rows, in percent; p is the paired test against the outcome named `baseline`, over questions.

    metric: None for the first.
    """
    of_metric = {outcome.candidate.name: outcome.scores[metric or outcome.metric] for outcome in outcomes}
    baseline = of_metric.get(BASELINE)
    return [
        Row(
            name=name,
            accuracy=tuple((100 * values.mean(axis=0)).tolist()),
            mean=float(100 * values.mean()),
            standard_error=100 * standard_error(values),
            p=None if baseline is None or name in (BASELINE, PLAIN) else paired_permutation_test(values, baseline),
            log_likelihood=None if outcome.log_likelihood is None else float(outcome.log_likelihood.mean()),
        )
        for outcome, (name, values) in zip(outcomes, of_metric.items(), strict=True)
    ]


def results_record(
    task: Task, outcomes: Sequence[Outcome], places: Sequence[tuple[int, int]], config: dict[str, Any], started: float
) -> dict[str, Any]:
    """`results.json`: lm-evaluation-harness's layout for the last outcome, and every outcome under `methods`.

    `config` has the path of the task's file, if any, as `data`, and the model's name, hash and dtype as `model_identity`.
    `started`: when the run did, in seconds as `time.time` has them.
    """
    methods, last = figures_of(outcomes, places), outcomes[-1]
    left_out = last.counts["questions_skipped"] + last.counts.get("questions_dropped", 0)
    return {
        "results": {task.name: {"alias": task.name, **methods[last.candidate.name]}},
        "methods": methods,
        "n-samples": {task.name: {"original": len(last.main) + left_out, "effective": len(last.main)}},
        "config": config,
        "data_sha256": None if config.get("data") is None else content_sha256(Path(config["data"])),
        "prompts_sha256": prompts_sha256(last.prompts),
        **environment(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "total_evaluation_time_seconds": round(time.time() - started, 3),
        "compilations": compilations(since=started),
    }


def figures_of(outcomes: Sequence[Outcome], places: Sequence[tuple[int, int]]) -> dict[str, dict[str, Any]]:
    """The figures of each candidate by its name, and how the first metric differs from the baseline's, `against_baseline`.

    p is the paired permutation test's over questions, p_holm after Holm's correction for all candidates; intervals (95 %) are
    paired bootstraps over questions. McNemar's exact p is of each position alone: positions share their questions.
    """
    methods = {outcome.candidate.name: _figures(outcome, places) for outcome in outcomes}
    p_values = [row.p for row in rows(outcomes)]
    baseline = next((outcome.main for outcome in outcomes if outcome.candidate.name == BASELINE), None)
    for outcome, figures, p, p_holm in zip(outcomes, methods.values(), p_values, holm(p_values), strict=True):
        if p is None or baseline is None:
            continue
        difference = outcome.main - baseline
        *by_position, of_mean = bootstrap_intervals(difference).tolist()
        figures["p_against_baseline,none"] = p
        figures["against_baseline"] = {
            "difference": float(difference.mean()),
            "interval": of_mean,
            "p": p,
            "p_holm": p_holm,
            "by_position": {
                str(position): {
                    "difference": float(difference[:, at].mean()),
                    "interval": interval,
                    "p_mcnemar": mcnemar(outcome.main[:, at], baseline[:, at])
                    if _are_verdicts(outcome.main) and _are_verdicts(baseline)
                    else None,
                }
                for at, ((_, position), interval) in enumerate(zip(places, by_position, strict=True))
            },
        }
    return methods


def json_line(record: dict[str, Any]) -> str:
    """A record as one line of JSON, by any reader's idea of a line: Unicode's line ends in texts are escaped."""
    return json.dumps(record, ensure_ascii=False).translate(_LINE_ENDS) + "\n"


def write_samples(path: Path, outcomes: Sequence[Outcome], tasks: Sequence[str] = ()) -> None:
    """`samples.jsonl`: one line a candidate and prompt. The same run writes the same bytes. `tasks`: each outcome's."""
    with replacing(path) as part, part.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for number, outcome in enumerate(outcomes):
            for at, prompt in enumerate(outcome.prompts):
                sample: dict[str, Any] = ({"task": tasks[number]} if tasks else {}) | {
                    "method": outcome.candidate.name,
                    "example": prompt.example,
                    "position": prompt.position,
                    "slot": prompt.slot,
                    "prompt_hash": hashlib.sha256(prompt.text.encode()).hexdigest()[:16],
                    "prompt_tokens": outcome.prompt_tokens[at],
                    "prompt_cut": prompt.was_cut,
                    "target": list(prompt.references) if prompt.golds else prompt.gold,
                    **{metric: _short(float(values.flat[at])) for metric, values in outcome.scores.items()},
                }
                if outcome.log_likelihood is not None:
                    sample["log_likelihood"] = _finite(float(outcome.log_likelihood.flat[at]), 4)
                if outcome.outputs is not None and outcome.output_tokens is not None:
                    output = outcome.outputs[at]
                    sample |= {"output": output, "output_tokens": outcome.output_tokens[at], "empty": not output.strip()}
                if prompt.faults:
                    sample["faults"] = list(prompt.faults)
                if prompt.details:
                    sample["details"] = dict(prompt.details)
                file.write(json_line(sample))


def _figures(outcome: Outcome, places: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Of one outcome: the first metric as `acc`, every metric by its own name."""
    positions = [str(position) for _, position in places]

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
    figures |= {"slots": [slot for slot, _ in places], "compilations": outcome.compilations, **outcome.counts}
    for metric, values in outcome.scores.items():
        figures |= {
            f"{metric},none": float(values.mean()),
            f"{metric}_stderr,none": _finite(standard_error(values)),
            f"{metric}_by_position": by_position(values),
        }
    if set(ROUGE) <= outcome.scores.keys():
        each = [{kind: float(outcome.scores[kind].flat[at]) for kind in ROUGE} for at in range(outcome.main.size)]
        figures["rouge_corpus,none"] = corpus_rouge(each)
    if outcome.prefix_of_outputs is not None and "prefix" in outcome.scores:
        prefix = outcome.scores["prefix"] > 0
        figures["prefix_differs_from_generation"] = int((outcome.prefix_of_outputs != prefix).sum())
        for metric in outcome.scores.keys() - {"prefix"}:
            figures[f"{metric}_but_not_prefix"] = int(((outcome.scores[metric] > 0) & ~prefix).sum())
    return figures


def _intervals(values: Float[np.ndarray, "Q S"]) -> list[list[float]]:
    """95 % of the mean at each position: Wilson's of verdicts, else a bootstrap."""
    if _are_verdicts(values):
        return [list(wilson_interval(float(column.sum()), len(values))) for column in values.T]
    return bootstrap_intervals(values)[:-1].tolist()


def _are_verdicts(values: Float[np.ndarray, "Q S"]) -> bool:
    return bool(np.isin(values, (0, 1)).all())


def _short(value: float) -> float | bool:
    """Verdicts as true and false, other scores with six digits."""
    return bool(value) if value in (0.0, 1.0) else round(value, 6)


def _finite(value: float, digits: int | None = None) -> float | None:
    if not math.isfinite(value):
        return None
    return value if digits is None else round(value, digits)
