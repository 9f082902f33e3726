"""Measure factors by the position of the fact, on questions that all candidates share. results.py records the outcomes.

`prefix`: the model's greedy output begins with an admitted opener and the gold answer; decided without generating. All other
metrics are the task's own (`task.metrics`), of generated text or of the likeliest option. Small models often know an answer but
fail on how it begins, so the same model is also measured on plain prompts without the forced opener.

Counts of questions, prompts and outputs in `results.json`, per candidate (`COUNTS`):

    questions_skipped                   too long for the window, and skipped (`--overlength skip`)
    questions_gold_empty                the metric's normalisation leaves nothing of a gold answer (`lpes_jax.tasks.leaks`)
    questions_answer_in_distractors     a distractor contains the answer too (`lpes_jax.tasks.leaks`)
    questions_dropped                   dropped for one of these two faults (`--drop-leaky`)
    prompts_cut                         shortened as the benchmark does it
    outputs_empty                       only white space was generated
    outputs_ended_by_length             all allowed tokens were generated
    outputs_with_unknown_ids            with an id that the tokenizer does not have
    verdicts_changed_alone              see below

The first four count all requested questions; a search records the same counts of its own questions as
`selection.search_questions`.

In 16 bits a verdict can depend on the shape of its batch, because rounding can swap two nearly equally likely tokens. The first
prompts are therefore also scored one by one, and `verdicts_changed_alone` counts the verdicts that differ. Methods do not have
this count, because each would have to be compiled again.

Letters: Q questions, S slots, N = Q x S prompts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.finite import not_finite
from lpes_jax.generation import generate_ids
from lpes_jax.methods import Maker
from lpes_jax.models.llama.model import Llama
from lpes_jax.scores import LikelihoodScorer
from lpes_jax.scoring import OptionScorer, Scorer
from lpes_jax.settings.groups import QuestionSettings
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.leaks import count_leaky
from lpes_jax.tasks.metrics import begins_with
from lpes_jax.tasks.prompts import EncodedPrompt, Overlength, Prompt, Task, prompts_sha256

PLAIN, BASELINE = "plain prompt", "baseline"
COUNTS = (
    *("questions_skipped", "questions_gold_empty", "questions_answer_in_distractors", "questions_dropped", "prompts_cut"),
    *("outputs_empty", "outputs_ended_by_length", "outputs_with_unknown_ids", "verdicts_changed_alone"),
)
SINGLE = 32  # prompts that are also scored one by one
OnPrompts = Callable[[int], None]  # gets the number of prompts that were finished


@dataclass(frozen=True)
class Candidate:
    """What is measured: factors, a method (`lpes_jax.methods`), or the unchanged model.

    `plain`: whether it is measured on prompts without the forced opener.
    """

    name: str
    factors: LayerFactors | None = None
    plain: bool = False
    method: Maker | None = None


@dataclass(frozen=True)
class Conditions:
    """What all candidates of a measurement have in common.

    Attributes:
        metrics: `prefix` or metrics of the task.
        max_new_tokens: The limit of new tokens; None means the task's.
        stop_ids: Ids that end an output.
        stop: Texts that end an output, in addition to the task's.
        overlength: Whether prompts that are too long are an error, or their questions are skipped.
        drop_leaky: See `lpes_jax.tasks.leaks.count_leaky`.
        batch_size: Prompts per pass and device; None means as many as fit the memory.
    """

    metrics: Sequence[str] = ("prefix",)
    max_new_tokens: int | None = None
    stop_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    overlength: Overlength = "error"
    drop_leaky: bool = False
    batch_size: int | None = None

    @classmethod
    def of(
        cls,
        flags: QuestionSettings,
        metrics: Sequence[str],
        stop_ids: Sequence[int],
        batch_size: int | None,
        stop: Sequence[str] = (),
    ) -> "Conditions":
        """The conditions that a verb's flags ask for."""
        return cls(metrics, flags.max_new_tokens, stop_ids, stop, flags.overlength, flags.drop_leaky, batch_size)


@dataclass(frozen=True)
class Outcome:
    """The results of a candidate.

    Attributes:
        candidate: The candidate.
        prompts: Q x S prompts, question by question.
        scores: The scores in [0, 1] of each metric, in the requested order; plots show the first metric.
        log_likelihood: Of the gold answers, in nats; None unless `prefix` or options are measured.
        compilations: The number of compiled shapes.
        prompt_tokens: Tokens of each prompt.
        counts: See `COUNTS`.
        outputs: The generated texts, if any.
        output_tokens: Their tokens.
        prefix_of_outputs: Whether each output begins with an admitted answer; None unless `prefix` is measured too.
    """

    candidate: Candidate
    prompts: list[Prompt]
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
        """The name of the first metric."""
        return next(iter(self.scores))

    @property
    def main(self) -> Float[np.ndarray, "Q S"]:
        """The scores of the first metric."""
        return self.scores[self.metric]


def default_metrics(task: Task) -> tuple[str, ...]:
    """The task's own metrics; for key-value retrieval, whose prompts force an opener, `prefix` before them."""
    return ("prefix", *task.metrics) if task.name == "kv" else task.metrics


def slots_of(task: Task, positions: Sequence[int], slots: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """The slots to measure, as (slot, position in percent): `slots` if given, otherwise those of `positions`.

    Raises UserError for an invalid or repeated slot or position, and for two slots at one position, because results are indexed
    by position.
    """
    if not slots:
        task_prompts.check_positions(positions)
        return [(task_prompts.slot(position, task.num_items), position) for position in positions]
    task_prompts.check_once(slots, "--slots")
    pairs = [(slot, task_prompts.position(slot, task.num_items)) for slot in slots]
    by_position: dict[int, int] = {}
    for slot, position in pairs:
        if (other := by_position.setdefault(position, slot)) != slot:
            raise UserError(
                f"--slots {other} and {slot} of {task.num_items} are both at {position} %, and results are indexed by "
                "position; give slots that are further apart, or one of them"
            )
    return pairs


def evaluate(
    model: Llama,
    tokenizer: Any,
    task: Task,
    examples: Sequence[Any],
    slots: Sequence[tuple[int, int]],
    candidates: Sequence[Candidate],
    conditions: Conditions | None = None,
    *,
    on_prompts: OnPrompts = lambda count: None,
    measured: dict[Any, Outcome] | None = None,
    earlier: Mapping[str, Outcome] = MappingProxyType({}),
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    on_refused: Callable[[Candidate, UserError], None] | None = None,
) -> list[Outcome]:
    """Measure every candidate on every example, with its fact at every slot. Equal factors are measured once.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        task: The task.
        examples: Its questions.
        slots: The slots of the fact, as (slot, position); see `slots_of`.
        candidates: What is measured.
        conditions: What all candidates have in common; None means the defaults of `Conditions`.
        on_prompts: Called with the number of finished prompts.
        measured: Outcomes of earlier calls with the same model, by request and factors; new outcomes are added.
        earlier: Outcomes of an interrupted call, by the candidates' names.
        on_outcome: Called with each new outcome.
        on_refused: Called with each candidate that cannot be measured on these prompts, and the reason. Such a candidate has no
            outcome. None: the reason is raised.

    Raises:
        UserError: The task lacks a metric, prompts are too long, `max_new_tokens` is below the longest gold answer, no question
            is left, `earlier` has other questions or metrics, or a candidate's method refuses the prompts' length or gives
            logits that are not finite.
    """
    measure = _Measure(model, tokenizer, task, conditions or Conditions(), on_prompts)
    versions = [
        (plain, version, measure.fitting(version, examples, slots))
        for plain, version in ((True, task.plain), (False, task))
        if version is not None and any(candidate.plain == plain for candidate in candidates)
    ]
    left_out = {example for _, _, (fitted, _) in versions for example in fitted.skipped}
    measured, outcomes = {} if measured is None else measured, []
    for plain, version, (fitted, counts) in versions:
        prompts = [prompt for prompt in fitted.prompts if prompt.example not in left_out]
        if not prompts:
            raise UserError(f"--overlength skip leaves out all {len(examples)} questions; use fewer items per prompt")
        counts |= {"questions_skipped": len(left_out), "prompts_cut": sum(prompt.was_cut for prompt in prompts)}
        request = measure.request(version, prompts, slots)
        chosen = [
            (candidate, (request, _key(candidate, model.config.num_layers)))
            for candidate in candidates
            if candidate.plain == plain
        ]
        new_candidates: dict[Any, Candidate] = {}
        for candidate, key in chosen:
            if candidate.name in earlier:
                measured[key] = measure.resumed(earlier[candidate.name], prompts, len(slots))
            if key in measured or key in new_candidates:
                on_prompts(len(prompts))
            else:
                new_candidates[key] = candidate
        if new_candidates:
            new = measure.outcomes(version, prompts, len(slots), list(new_candidates.values()), counts)
            for key, outcome in zip(new_candidates, new, strict=True):
                if isinstance(outcome, Outcome):
                    on_outcome(outcome)
                    measured[key] = replace(outcome, prompts=[])
                elif on_refused is None:
                    raise outcome
                else:
                    for candidate in (candidate for candidate, own_key in chosen if own_key == key):
                        on_refused(candidate, outcome)
        outcomes += [
            replace(measured[key], candidate=candidate, prompts=prompts, counts=measured[key].counts | counts)
            for candidate, key in chosen
            if key in measured
        ]
    order = {candidate.name: index for index, candidate in enumerate(candidates)}
    return sorted(outcomes, key=lambda outcome: order[outcome.candidate.name])


def _key(candidate: Candidate, num_layers: int) -> Any:
    """A key that is equal for candidates with equal outcomes on the same prompts."""
    if candidate.method is not None:
        return candidate.method
    return (candidate.factors or LayerFactors.uniform(1.0, num_layers)).key


class _Measure:
    """Measures candidates on a task's prompts. `new_tokens` is 0 if nothing is generated."""

    def __init__(self, model: Llama, tokenizer: Any, task: Task, conditions: Conditions, on_prompts: OnPrompts):
        known = ("prefix", *task.metrics) if task.decided_by == "generation" else task.metrics
        if unknown := [metric for metric in conditions.metrics if metric not in known]:
            raise UserError(f"--metrics {unknown[0]}: --task {task.name} has {', '.join(known)}")
        generates = task.decided_by == "generation" and any(metric != "prefix" for metric in conditions.metrics)
        most = task.max_new_tokens if conditions.max_new_tokens is None else conditions.max_new_tokens
        self.model, self.tokenizer, self.conditions, self.on_prompts = model, tokenizer, conditions, on_prompts
        self.metrics, self.batch_size = conditions.metrics, conditions.batch_size
        self.new_tokens = most if generates else 0

    def fitting(
        self, task: Task, examples: Sequence[Any], slots: Sequence[tuple[int, int]]
    ) -> tuple[task_prompts.Fitted, dict[str, int]]:
        """The prompts that fit, and the counts of leaky questions."""
        prompts = [task.prompt(example, slot, position) for example in examples for slot, position in slots]
        prompts, counts = count_leaky(prompts, self.conditions.drop_leaky)
        fitted = task_prompts.fit(
            prompts,
            self.tokenizer,
            self.model.config.max_position_embeddings,
            max_prompt_tokens=task.max_prompt_tokens,
            new_tokens=self.new_tokens,
            overlength=self.conditions.overlength,
        )
        return fitted, counts

    def request(self, task: Task, prompts: Sequence[Prompt], slots: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
        """What the outcomes of all candidates depend on, in addition to the model."""
        texts = tuple(self.conditions.stop_ids), tuple(self.conditions.stop)
        return task, tuple(slots), prompts_sha256(prompts), tuple(self.metrics), self.new_tokens, *texts

    def resumed(self, earlier: Outcome, prompts: Sequence[Prompt], num_slots: int) -> Outcome:
        """The outcome of an interrupted call. Raises UserError if it was measured on other questions or metrics."""
        if earlier.main.shape != (len(prompts) // num_slots, num_slots) or earlier.scores.keys() != set(self.metrics):
            name = earlier.candidate.name
            raise UserError(f"--resume: {name} was measured on other questions or metrics; give another --output-path")
        return earlier

    def outcomes(
        self, task: Task, prompts: list[Prompt], num_slots: int, candidates: Sequence[Candidate], counts: dict[str, int]
    ) -> Iterator[Outcome | UserError]:
        """Yield the outcome of each candidate, or the reason that there is none."""
        window, shape = self.model.config.max_position_embeddings, (len(prompts) // num_slots, num_slots)
        encoded = task_prompts.encode(prompts, self.tokenizer, window)
        verdicts, single_scorer = None, None
        count = len(candidates)
        half = self.model.embed[...].dtype.itemsize < 4
        if task.decided_by == "options":
            verdicts = OptionScorer(self.model, self.tokenizer, prompts, batch_size=self.batch_size, individuals=count)
            single_scorer = (
                OptionScorer(self.model, self.tokenizer, prompts[:SINGLE], batch_size=1, individuals=count) if half else None
            )
        elif "prefix" in self.metrics:
            if not task_prompts.short_answers(prompts):
                raise UserError(f"--metrics prefix: --task {task.name} has no short answers that an output could begin with")
            verdicts = Scorer(self.model, encoded, batch_size=self.batch_size, individuals=count)
            single_scorer = Scorer(self.model, encoded[:SINGLE], batch_size=1, individuals=count) if half else None
        if self.new_tokens:
            longest = max((len(ids) for prompt in encoded for ids in prompt.answers), default=0)
            if self.new_tokens < longest:
                raise UserError(f"--max-new-tokens {self.new_tokens} is below the longest gold answer, {longest} tokens")
        for candidate in candidates:
            try:
                outcome = self._outcome(task, prompts, shape, encoded, candidate, counts, verdicts, single_scorer)
                yield replace(outcome, scores={metric: outcome.scores[metric] for metric in self.metrics})
            except UserError as error:
                yield error

    def _outcome(
        self,
        task: Task,
        prompts: list[Prompt],
        shape: tuple[int, int],
        encoded: Sequence[EncodedPrompt],
        candidate: Candidate,
        counts: dict[str, int],
        verdicts: LikelihoodScorer | None,
        single_scorer: LikelihoodScorer | None,
    ) -> Outcome:
        """The outcome of one candidate, with the scores of all metrics that were computed."""
        factors = candidate.factors or LayerFactors.uniform(1.0, self.model.config.num_layers)
        scores: dict[str, np.ndarray] = {}
        log_likelihood = None
        changed: dict[str, int] = {}
        if verdicts is not None:
            correct, log_likelihood = self._verdicts(verdicts, candidate, factors, self.on_prompts)
            scores["prefix" if task.decided_by == "generation" else task.metrics[0]] = correct.astype(float).reshape(shape)
            if single_scorer is not None and candidate.method is None:
                correct_single, _ = self._verdicts(single_scorer, candidate, factors, lambda count: None)
                changed["verdicts_changed_alone"] = int((correct_single != correct[:SINGLE]).sum())
        outcome = Outcome(
            candidate,
            prompts,
            scores,
            None if log_likelihood is None else log_likelihood.reshape(shape),
            0 if verdicts is None else verdicts.compilations,
            [len(prompt.ids) for prompt in encoded],
            counts | changed,
        )
        return self._generated(outcome, task, encoded, factors, shape) if self.new_tokens else outcome

    def _verdicts(
        self, scorer: LikelihoodScorer, candidate: Candidate, factors: LayerFactors, on_prompts: OnPrompts
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
            correct, log_likelihood = scorer.method_scores(method, on_prompts)
        if len(bad := np.flatnonzero(~np.isfinite(log_likelihood[0]))):
            texts, method = scorer.sequences(int(bad[0])), candidate.method is not None
            raise not_finite(self.model, texts, factors, name=candidate.name, method=method)
        return correct[0], log_likelihood[0]

    def _generated(
        self, outcome: Outcome, task: Task, encoded: Sequence[EncodedPrompt], factors: LayerFactors, shape: tuple[int, int]
    ) -> Outcome:
        on_prompts = self.on_prompts if "prefix" not in self.metrics else lambda count: None  # each prompt counts once
        ids = generate_ids(
            self.model,
            [prompt.ids for prompt in encoded],
            factors=factors,
            make_method=None if outcome.candidate.method is None else partial(outcome.candidate.method, self.model.config),
            max_new_tokens=self.new_tokens,
            stop=self.conditions.stop_ids,
            batch_size=self.batch_size,
            on_prompts=on_prompts,
            name=outcome.candidate.name,
        )
        outputs = [
            task_prompts.before_stop(output, (*task.stop, *self.conditions.stop))
            for output in self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        ]
        scored = [task.score(output, prompt) for output, prompt in zip(outputs, outcome.prompts, strict=True)]
        own = {metric: np.array([score[metric] for score in scored]).reshape(shape) for metric in task.metrics}
        has_prefix = [begins_with(new, prompt.answers) for new, prompt in zip(ids, encoded, strict=True)]
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
            prefix_of_outputs=np.array(has_prefix).reshape(shape) if "prefix" in self.metrics else None,
            counts=outcome.counts | counts,
        )
