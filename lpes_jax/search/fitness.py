"""The fitness of individuals on the search examples, and the history of a run.

It is the weighted sum over the search positions of the same examples' accuracy (section 3.2), or of their mean answer
log-likelihood. Individuals with the same factors are scored once. Letters: P population, L layers.
"""

import math
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Float

from lpes_jax.errors import UserError
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama
from lpes_jax.report.progress import SearchProgress
from lpes_jax.rope import Granularity
from lpes_jax.scoring import GeneratedScorer, OptionScorer, Scorer
from lpes_jax.search.run_folder import RunFolder
from lpes_jax.search.settings import SearchSettings
from lpes_jax.search.stop import GracefulStop
from lpes_jax.search.strategies import BudgetSpent
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.prompts import Prompt, Task

Trace = Callable[[int, Float[np.ndarray, "L *units"], Granularity], int | str | None]  # (prompt, factors, granularity) -> layer
SCORES = ("fitness", "accuracy", "log_likelihood", "not_finite")  # the last where it applies


class Fitness:
    """Scores generations and keeps the history: `records` are the lines of history.jsonl.

    `first_bad_layer` says where a score became NaN or infinite (`lpes_jax.search.non_finite`).
    """

    def __init__(
        self,
        settings: SearchSettings,
        scorer: Scorer | OptionScorer | GeneratedScorer,
        first_bad_layer: Trace,
        positions: Sequence[int],
        granularity: Granularity,
        folder: RunFolder,
        progress: SearchProgress,
        stop: GracefulStop,
    ):
        self.settings, self.scorer, self.folder, self.progress, self.stop = settings, scorer, folder, progress, stop
        self.first_bad_layer, self.positions = first_bad_layer, positions
        self.granularity: Granularity = granularity
        self.weights = settings.weights if len(positions) == len(settings.search_positions) else (1.0,)
        self.records: list[dict[str, Any]] = []
        self.evaluations = 0  # individuals that the model scored: those whose factors had not been seen
        self._seen: dict[tuple, dict[str, Any]] = {}

    @property
    def best(self) -> dict[str, Any]:
        """The fittest individual of all; the first of equals."""
        return max(self.records, key=lambda record: -np.inf if record["fitness"] is None else record["fitness"])

    def generation(
        self, number: int, of: int, drafts: list[dict[str, Any]], factors: Float[np.ndarray, "P L *units"]
    ) -> Float[np.ndarray, "P"]:
        """The fitness of a generation, NaN where scores are not finite; a line of history for each individual.

        `drafts` are the lines without factors and scores. Raises BudgetSpent when `--max-evaluations` individuals were scored,
        with no individual scored beyond, and UserError when no score is finite: there is nothing to go on from.
        """
        best = f"best {self.best['fitness']:.4f}" if self.records and self.best["fitness"] is not None else ""
        self.progress.note(f"generation {number}/{of}  {best}")
        before = len(self.records)
        at_once = self.scorer.individuals_at_once
        for start in range(0, len(drafts), at_once):
            block = slice(start, start + at_once)
            self._block(drafts[block], factors[block])
        made = self.records[before:]
        if bad := [record for record in made if record["fitness"] is None]:
            where = f"generation {number}: {len(bad)} of {len(made)} have scores that are not finite; {_told(bad[0])}"
            if len(bad) == len(made):
                raise UserError(f"{where}; try --dtype float32, or factors nearer to 1 (--min-factor, --max-factor)")
            print(f"note: {where}", file=sys.stderr)
        return np.array([np.nan if record["fitness"] is None else record["fitness"] for record in made])

    def of_factors(self, factors: Float[np.ndarray, "P L *units"], granularity: Granularity = "layer") -> list[dict[str, Any]]:
        """Fitness, accuracy and log-likelihood of factors, scored where they have not been seen."""
        unseen = {_key(row): row for row in factors if _key(row) not in self._seen}
        self.progress.skip((len(factors) - len(unseen)) * self.scorer.num_prompts)
        if unseen:
            scores = self.scorer(np.stack(list(unseen.values())), granularity, on_prompts=self.progress.prompts)
            self.evaluations += len(unseen)
            for (key, row), correct, log_likelihood in zip(unseen.items(), *scores, strict=True):
                self._seen[key] = self._summary(correct, log_likelihood)
                if not np.isfinite(log_likelihood).all():
                    self._seen[key]["not_finite"] = self._where(row, granularity, log_likelihood)
        return [self._seen[_key(row)] for row in factors]

    def _block(self, drafts: list[dict[str, Any]], factors: Float[np.ndarray, "P L *units"]) -> None:
        keys = [_key(row) for row in factors]
        cached = [key in self._seen or key in keys[:i] for i, key in enumerate(keys)]
        fits = self._within_budget(cached)
        drafts = [
            draft | {"factors": rounded(row), "cached": known}
            for draft, row, known in zip(drafts[:fits], factors, cached, strict=False)
        ]
        recorded = self.folder.recorded[len(self.records) : len(self.records) + len(drafts)]
        for draft, record in zip(drafts, recorded, strict=False):
            self.folder.must_continue(draft, record)
        if len(recorded) == len(drafts):
            self.evaluations += sum(not record["cached"] for record in recorded)
            self.progress.skip(len(recorded) * self.scorer.num_prompts)
            summaries = [{name: record[name] for name in SCORES if name in record} for record in recorded]
            self._seen |= zip(keys, summaries, strict=False)
        else:  # a block that was cut is scored again as a whole: likelihoods may hang on who is scored together, by a digit
            summaries = self.of_factors(factors[:fits], self.granularity)
        records = recorded + [draft | summary for draft, summary in zip(drafts, summaries, strict=True)][len(recorded) :]
        self.folder.append(records[len(recorded) :])
        self.records += records
        self.stop.check()
        if fits < len(cached) or self.evaluations == self.settings.max_evaluations:
            raise BudgetSpent

    def _within_budget(self, cached: list[bool]) -> int:
        """How many individuals, from the first, need no more evaluations than are left."""
        if self.settings.max_evaluations is None:
            return len(cached)
        needed = np.cumsum([not known for known in cached])
        return int((needed <= self.settings.max_evaluations - self.evaluations).sum())

    def _where(
        self, factors: Float[np.ndarray, "L *units"], granularity: Granularity, log_likelihood: Float[np.ndarray, "N"]
    ) -> dict[str, Any]:
        """The first prompt with a score that is not finite, and the layer in which it arises."""
        prompt = int(np.flatnonzero(~np.isfinite(log_likelihood))[0])
        return {"prompt": prompt, "first_layer": self.first_bad_layer(prompt, factors, granularity)}

    def _summary(self, correct: np.ndarray, log_likelihood: np.ndarray) -> dict[str, Any]:
        places = len(self.positions)
        accuracy = correct.reshape(-1, places).mean(axis=0, dtype=np.float64)
        likelihood = log_likelihood.reshape(-1, places).astype(np.float64)
        # The geometric mean of the answer tokens' probabilities: in (0, 1], whatever the answer's length.
        probability = np.exp(likelihood / self.scorer.answer_tokens.reshape(-1, places)).mean(axis=0)
        weights = np.array(self.weights)
        finite = bool(np.isfinite(likelihood).all())
        by_text = isinstance(self.scorer, GeneratedScorer)  # which has no likelihood
        if self.settings.fitness == "log_likelihood":
            fitness = float(weights @ likelihood.mean(axis=0))
        else:
            fitness = float(weights @ accuracy)
            if self.settings.tie_break and not by_text:
                fitness += tie_break_scale(weights.tolist(), len(likelihood)) * float(weights @ probability)
        return {
            "fitness": round(fitness, 9) if finite else None,
            "accuracy": {str(position): value for position, value in zip(self.positions, accuracy.tolist(), strict=True)},
            "log_likelihood": {
                str(position): round(value, 4) if finite and not by_text else None
                for position, value in zip(self.positions, likelihood.mean(axis=0).tolist(), strict=True)
            },
        }


def _told(record: dict[str, Any]) -> str:
    """A record without finite scores in words: its factors, and where it goes wrong."""
    where = record["not_finite"]
    layer = where["first_layer"]
    first = {None: "", "embedding": " in the embedding", "logits": " in the logits"}.get(layer, f" in layer {layer}")
    factors = np.asarray(record["factors"]).ravel()
    shown = " ".join(f"{factor:g}" for factor in factors[:32]) + (" ..." if len(factors) > 32 else "")
    return f"individual {record['id']}, factors {shown}: first{first or ' in no layer when alone'}, at prompt {where['prompt']}"


def tie_break_scale(weights: Sequence[float], examples: int) -> float:
    """Half of the smallest difference that two weighted accuracies can have: what is added for likelihood stays below it.

    Weights are taken as decimals; two accuracies differ by a multiple of their greatest common divisor over `examples`.
    """
    fractions = [Fraction(str(weight)) for weight in weights if weight > 0]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    return math.gcd(*(int(fraction * denominator) for fraction in fractions)) / denominator / examples / 2


def search_prompts(
    settings: SearchSettings, config: LlamaConfig, task: Task, tokenizer: Any, examples: Sequence[Any], places
) -> list[Prompt]:
    """The prompts that a task's search examples are scored on, question by question.

    Raises UserError where the task cannot be scored in the way that is asked for.
    """
    by_text = settings.fitness == "metric" and task.decided_by == "generation"
    prompts = [task.prompt(example, *place) for example in examples for place in places]
    prompts = fit(settings, config, task, tokenizer, prompts, by_text)
    if not by_text and not all(prompt.answers for prompt in prompts):
        wanted = "--algorithm gradient" if settings.algorithm == "gradient" else f"--fitness {settings.fitness}"
        raise UserError(f"{wanted}: --task {task.name} has no short answers to expect; use --fitness metric")
    return prompts


def make_scorer(
    settings: SearchSettings,
    model: Llama,
    tokenizer: Any,
    tasks: Sequence[Task],
    prompts: Sequence[Sequence[Prompt]],
    stop_ids: Sequence[int],
) -> Scorer | OptionScorer | GeneratedScorer:
    """What scores the search prompts of all tasks, which are of one kind."""
    everything, task = [prompt for of_task in prompts for prompt in of_task], tasks[0]
    if task.decided_by == "options":
        return OptionScorer(model, tokenizer, everything, batch_size=settings.batch_size)
    if settings.fitness == "metric":
        metric, new_tokens = task.metrics[0], settings.max_new_tokens or task.max_new_tokens

        def score(output: str, prompt: Prompt) -> float:
            return task.score(task_prompts.before_stop(output, task.stop), prompt)[metric]

        return GeneratedScorer(
            model, tokenizer, everything, score, max_new_tokens=new_tokens, stop_ids=stop_ids, batch_size=settings.batch_size
        )
    encoded = task_prompts.encode(everything, tokenizer, model.config.max_position_embeddings)
    return Scorer(model, encoded, batch_size=settings.batch_size, population_chunk=settings.population_chunk)


def fit(
    settings: SearchSettings, config: LlamaConfig, task: Task, tokenizer: Any, prompts: Sequence[Prompt], generates: bool
) -> list[Prompt]:
    """The prompts as they fit the window. Raises UserError for those that do not, by `--overlength`."""
    fitted = task_prompts.fit(
        prompts,
        tokenizer,
        config.max_position_embeddings,
        max_prompt_tokens=task.max_prompt_tokens,
        new_tokens=(settings.max_new_tokens or task.max_new_tokens) if generates else 0,
        overlength=settings.overlength,
    )
    if prompts and not fitted.prompts:
        raise UserError("--overlength skip leaves out all questions; use fewer items a prompt")
    return fitted.prompts


def _key(factors: Float[np.ndarray, "L *units"]) -> tuple:
    return factors.shape, factors.tobytes()


def rounded(factors: Float[np.ndarray, "L *units"]) -> list:
    """Factors as the history has them."""
    return np.round(factors.astype(np.float64), 7).tolist()
