"""The fitness of individuals on the search examples, and the history of a run.

It is the weighted sum over the search positions of the same examples' accuracy (section 3.2), or of their mean answer
log-likelihood. Of a mixture it is the sum over its tasks of their weight times this. Individuals with the same factors and
gains are scored once; in a race (racing.py), hopeless ones on a part of the examples.

Letters: P population, L layers, N prompts, U units of a race.
"""

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from lpes_jax.errors import UserError
from lpes_jax.factors import array_of, json_of
from lpes_jax.finite import WAY_OUT, describe_layer, shown
from lpes_jax.generation import GeneratedScorer
from lpes_jax.mesh import make_mesh, mesh_of
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama
from lpes_jax.models.llama.sharding import put_model
from lpes_jax.report.progress import SearchProgress
from lpes_jax.rope import Granularity
from lpes_jax.scoring import OptionScorer, Scorer, Scores
from lpes_jax.search import racing
from lpes_jax.search.racing import Bar, StagedScorer
from lpes_jax.search.stop import BudgetSpent, GracefulStop
from lpes_jax.settings.search import SearchSettings
from lpes_jax.store.run_folder import RunFolder
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.leaks import count_leaky
from lpes_jax.tasks.prompts import Prompt, Task

# What the model says of an individual; the last three where they apply. `raced` is the share of the examples that it was scored
# on before a race dropped it, with which its accuracies are of these and its fitness is an estimate; `values` are what a race
# compares others with.
SCORES = ("fitness", "accuracy", "log_likelihood", "not_finite", "raced", "values")


class Individuals(NamedTuple):
    """Factors `[P, L, *units]`, and gains or None where they are not learnt; or those of one individual, without P."""

    factors: Float[np.ndarray, "..."]
    gains: Float[np.ndarray, "..."] | None = None

    @classmethod
    def of(cls, factors: Any, gains: Any = None) -> "Individuals":
        """On the host."""
        return cls(np.asarray(factors), None if gains is None else np.asarray(gains))

    def at(self, chosen: Any) -> "Individuals":
        """One of them, by its number, or some."""
        return Individuals(self.factors[chosen], None if self.gains is None else self.gains[chosen])

    @property
    def key(self) -> tuple:
        """Of one individual: what its scores hang on."""
        factors = self.factors.shape, self.factors.tobytes()
        return factors if self.gains is None else (*factors, self.gains.shape, self.gains.tobytes())

    @property
    def record(self) -> dict[str, list]:
        """Of one individual, as the history has it."""
        record = {"factors": rounded(self.factors)}
        return record if self.gains is None else record | {"gains": rounded(self.gains)}


# (prompt, individual or None for the model as it is, granularities) -> layer
Trace = Callable[[int, Individuals | None, tuple[Granularity, Granularity]], int | str | None]


class JoinedScorer:
    """Several scorers one behind the other, each of the prompts of some tasks: a mixture with options and without."""

    def __init__(self, scorers: Sequence[Scorer | OptionScorer]):
        self._scorers = scorers
        self.longest = max(scorer.longest for scorer in scorers)
        for scorer in scorers:
            scorer.lengthen(self.longest)
        self.num_prompts = sum(scorer.num_prompts for scorer in scorers)
        self.answer_tokens = np.concatenate([scorer.answer_tokens for scorer in scorers])
        self.individuals_at_once = max(scorer.individuals_at_once for scorer in scorers)

    def __call__(
        self,
        factors: Float[np.ndarray, "P ..."],
        granularity: Granularity = "layer",
        on_prompts: Callable[[int], None] = lambda count: None,
        **gains: Any,
    ) -> Scores:
        """As `Scorer`'s."""
        parts = [scorer(factors, granularity, on_prompts, **gains) for scorer in self._scorers]
        return Scores(*(np.concatenate(of_all, axis=1) for of_all in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Group:
    """The prompts of one task of a mixture, which follow each other: `count` of them, question by question.

    `positions` of a question's prompts, and their weights, which sum to 1; `share` of the task, of 1 in all.
    """

    title: str
    count: int
    positions: tuple[int, ...]
    weights: tuple[float, ...]
    share: float


class Fitness:
    """Scores generations and keeps the history: `records` are the lines of history.jsonl.

    `first_bad_layer` says where a score became NaN or infinite (`lpes_jax.finite`). `groups`: the tasks of a mixture; without
    them all prompts are asked at the same positions.
    """

    def __init__(
        self,
        settings: SearchSettings,
        scorer: Scorer | OptionScorer | GeneratedScorer | StagedScorer | JoinedScorer,
        first_bad_layer: Trace,
        positions: Sequence[int],
        granularities: tuple[Granularity, Granularity],
        folder: RunFolder,
        progress: SearchProgress,
        stop: GracefulStop,
        groups: Sequence[Group] = (),
    ):
        self.groups = groups
        self.settings, self.scorer, self.folder, self.progress, self.stop = settings, scorer, folder, progress, stop
        self.first_bad_layer, self.positions = first_bad_layer, positions
        self.granularities = granularities  # of factors and gains
        self.weights = settings.objective.weights if len(positions) == len(settings.objective.search_positions) else (1.0,)
        self.records: list[dict[str, Any]] = []
        self.evaluations = 0  # individuals that the model scored, on all examples or in a race: factors that had not been seen
        self._prompts_saved = 0
        self._traced: set[int] = set()  # prompts on which the model as it is was found to be finite
        self._seen: dict[tuple, dict[str, Any]] = {}

    @property
    def best(self) -> dict[str, Any]:
        """The fittest individual of all; the first of equals. It was scored on all examples."""
        return max(self.records, key=lambda record: -np.inf if record["fitness"] is None else record["fitness"])

    @property
    def prompts_scored(self) -> int:
        """(individual, prompt) pairs that the model scored."""
        return self.evaluations * self.scorer.num_prompts - self._prompts_saved

    def generation(
        self,
        number: int,
        of: int,
        drafts: list[dict[str, Any]],
        individuals: Individuals,
        *,
        rivals: Sequence[int] = (),
        keep: int = 0,
    ) -> Float[np.ndarray, "P"]:
        """The fitness of a generation, NaN where scores are not finite; a line of history for each individual.

        `drafts` are the lines without numbers and scores. `rivals`, by their ids, and `keep` are a race's bar (`racing.Bar`);
        without both there is none. Raises BudgetSpent when `--max-evaluations` individuals were scored, with no individual
        scored beyond (in a race, too, one is one), and UserError when no score is finite: there is nothing to go on from.
        """
        best = f"best {self.best['fitness']:.4f}" if self.records and self.best["fitness"] is not None else ""
        self.progress.note(f"generation {number}/{of}  {best}")
        before = len(self.records)
        bar = self._bar(rivals, keep) if self.settings.ga.race else None
        at_once = len(drafts) if bar else self.scorer.individuals_at_once  # who is dropped must not hang on blocks
        for start in range(0, len(drafts), at_once):
            block = slice(start, start + at_once)
            self._block(drafts[block], individuals.at(block), bar)
            self.check_model(f"generation {number}", self.records[before:])
        made = self.records[before:]
        self.check_any(f"generation {number}", made)
        if bad := [record for record in made if record["fitness"] is None]:
            print(f"note: generation {number}: {_count(made)}; {_told(bad[0])}", file=sys.stderr)
        return np.array([np.nan if record["fitness"] is None else record["fitness"] for record in made])

    def check_model(self, when: str, made: Sequence[dict[str, Any]]) -> None:
        """Raise UserError where scores of individuals are not finite because those of the model as it is are not."""
        for prompt in [record["not_finite"]["prompt"] for record in made if record["fitness"] is None]:
            if prompt in self._traced:
                continue
            self._traced.add(prompt)
            if (layer := self.first_bad_layer(prompt, None, ("layer", "layer"))) is not None:
                raise UserError(
                    f"{when}: {_count(made)}: the model's logits are not finite, without factors too: "
                    f"first {describe_layer(layer)}, at prompt {prompt}; {WAY_OUT}"
                )

    def check_any(self, when: str, made: Sequence[dict[str, Any]]) -> None:
        """Raise UserError where no individual's scores are finite."""
        if made and all(record["fitness"] is None for record in made):
            way_out = "try --dtype float32, or factors nearer to 1 (--min-factor, --max-factor)"
            raise UserError(f"{when}: {_count(made)}; {_told(made[0])}; {way_out}")

    def of_factors(self, factors: Float[np.ndarray, "P L *units"], granularity: Granularity = "layer") -> list[dict[str, Any]]:
        """Fitness, accuracy and log-likelihood of factors on all examples, scored where that was not done."""
        individuals = Individuals(factors)
        for key in (Individuals(row).key for row in factors):
            if "raced" in self._seen.get(key, {}):
                del self._seen[key]
        return [
            {name: value for name, value in summary.items() if name != "values"}
            for summary in self._summaries(individuals, (granularity, "layer"))
        ]

    def _summaries(
        self, individuals: Individuals, granularities: tuple[Granularity, Granularity], bar: Bar | None = None
    ) -> list[dict[str, Any]]:
        """What the history says of them, scored where they have not been seen: on all examples, or in a race to a bar."""
        keys = [individuals.at(at).key for at in range(len(individuals.factors))]
        unseen: dict[tuple, int] = {}
        for at, key in enumerate(keys):
            if key not in self._seen:
                unseen.setdefault(key, at)
        self.progress.skip((len(keys) - len(unseen)) * self.scorer.num_prompts)
        if unseen:
            rows = individuals.at(list(unseen.values()))
            if bar is None:
                correct, likelihood = self._scored(rows, granularities)
                found = [
                    self._summary(rows.at(at), granularities, correct[at], likelihood[at]) for at in range(len(rows.factors))
                ]
            else:
                found = self._raced(rows, bar)
            self.evaluations += len(unseen)
            self._seen |= zip(unseen, found, strict=True)
        return [self._seen[key] for key in keys]

    def _scored(self, rows: Individuals, granularities: tuple[Granularity, Granularity], **more: Any) -> Scores:
        """What the model says of them; `more` is for a scorer in stages."""
        of_factors, of_gains = granularities
        more |= {} if rows.gains is None else {"gains": rows.gains, "gains_granularity": of_gains}
        return self.scorer(rows.factors, of_factors, on_prompts=self.progress.prompts, **more)

    def _bar(self, rivals: Sequence[int], keep: int) -> Bar | None:
        """What a generation races to. Nothing where a rival has not been scored on everything, with finite scores."""
        values = [self.records[rival].get("values") for rival in rivals]
        if not (rivals or keep) or None in values:
            return None
        units = self.scorer.bounds[-1] if isinstance(self.scorer, StagedScorer) else 0
        try:
            return Bar(np.array([racing.from_text(text) for text in values if text]).reshape(len(values), units), keep)
        except ValueError as error:
            raise UserError(
                f"--resume: the values of an individual in {self.folder.history_path} are not those of a race; give another "
                "--output-path"
            ) from error

    def _raced(self, rows: Individuals, bar: Bar) -> list[dict[str, Any]]:
        """The summaries of a generation's new individuals after their race."""
        scorer = self.scorer
        assert isinstance(scorer, StagedScorer)
        shape = len(rows.factors), scorer.num_prompts
        correct, likelihood = np.zeros(shape, bool), np.zeros(shape, np.float32)

        def score(stage: int, chosen: np.ndarray) -> np.ndarray:
            new = self._scored(rows.at(chosen), self.granularities, stages=[stage])
            correct[chosen] |= new.correct
            likelihood[chosen] += new.log_likelihood
            return self._values(*new)[:, scorer.bounds[stage] : scorer.bounds[stage + 1]]

        values, scored = racing.race(score, len(rows.factors), scorer.bounds, bar, self._most_of_a_prompt())
        estimates = racing.estimates(values, scored, bar)
        found = []
        for at in range(len(rows.factors)):
            prompts = scorer.prompts_of(scorer.bounds.index(scored[at]))
            part = None if len(prompts) == scorer.num_prompts else prompts
            summary = self._summary(rows.at(at), self.granularities, correct[at, prompts], likelihood[at, prompts], part)
            found.append(summary | ({"fitness": round(estimates[at], 9)} if at in estimates else {}))
            self._save(scorer.num_prompts - len(prompts))
        return found

    def _save(self, prompts: int) -> None:
        self._prompts_saved += prompts
        self.progress.skip(prompts)

    def _block(self, drafts: list[dict[str, Any]], individuals: Individuals, bar: Bar | None) -> None:
        rows = [individuals.at(at) for at in range(len(drafts))]
        keys = [row.key for row in rows]
        cached = [key in self._seen or key in keys[:i] for i, key in enumerate(keys)]
        fits = self._within_budget(cached)
        drafts = [
            draft | row.record | {"cached": known} for draft, row, known in zip(drafts[:fits], rows, cached, strict=False)
        ]
        parts = [group.title for group in self.groups] or [str(position) for position in self.positions]  # of an accuracy
        recorded = self.folder.recorded[len(self.records) : len(self.records) + len(drafts)]
        for draft, record in zip(drafts, recorded, strict=False):
            self.folder.must_continue(draft, record)
            self.folder.must_continue({"id": record["id"], "parts": parts}, record | {"parts": list(record["accuracy"])})
        if len(recorded) == len(drafts):
            new = [record for record in recorded if not record["cached"]]
            self.evaluations += len(new)
            self._prompts_saved += sum(round((1 - record.get("raced", 1)) * self.scorer.num_prompts) for record in new)
            self.progress.skip(len(recorded) * self.scorer.num_prompts)
            summaries = [{name: record[name] for name in SCORES if name in record} for record in recorded]
            self._seen |= zip(keys, summaries, strict=False)
        else:  # a block that was cut is scored again as a whole: likelihoods may hang on who is scored together, by a digit
            summaries = self._summaries(individuals.at(slice(fits)), self.granularities, bar)
        records = recorded + [draft | summary for draft, summary in zip(drafts, summaries, strict=True)][len(recorded) :]
        self.folder.append(records[len(recorded) :])
        self.records += records
        self.stop.check()
        if fits < len(cached) or self.evaluations == self.settings.ga.max_evaluations:
            raise BudgetSpent

    def _within_budget(self, cached: list[bool]) -> int:
        """How many individuals, from the first, need no more evaluations than are left."""
        if self.settings.ga.max_evaluations is None:
            return len(cached)
        needed = np.cumsum([not known for known in cached])
        return int((needed <= self.settings.ga.max_evaluations - self.evaluations).sum())

    def _summary(
        self,
        individual: Individuals,
        granularities: tuple[Granularity, Granularity],
        correct: np.ndarray,
        log_likelihood: np.ndarray,
        prompts: Int[np.ndarray, "n"] | None = None,
    ) -> dict[str, Any]:
        """What the history says of scores, of all prompts or of some by their numbers."""
        if self.groups:
            return self._summary_by_task(individual, granularities, correct, log_likelihood)
        places = len(self.positions)
        answer_tokens = self.scorer.answer_tokens if prompts is None else self.scorer.answer_tokens[prompts]
        accuracy = correct.reshape(-1, places).mean(axis=0, dtype=np.float64)
        likelihood = log_likelihood.reshape(-1, places).astype(np.float64)
        # The geometric mean of the answer tokens' probabilities: in (0, 1], whatever the answer's length.
        probability = np.exp(likelihood / answer_tokens.reshape(-1, places)).mean(axis=0)
        weights = np.array(self.weights)
        finite = bool(np.isfinite(likelihood).all())
        by_text = isinstance(self.scorer, GeneratedScorer)  # which has no likelihood
        if self.settings.objective.fitness == "log_likelihood":
            fitness = float(weights @ likelihood.mean(axis=0))
        else:
            fitness = float(weights @ accuracy)
            if self.settings.objective.tie_break and not by_text:
                fitness += tie_break_scale(weights.tolist(), len(likelihood)) * float(weights @ probability)
        summary = {
            "fitness": round(fitness, 9) if finite else None,
            "accuracy": {str(position): value for position, value in zip(self.positions, accuracy.tolist(), strict=True)},
            "log_likelihood": {
                str(position): round(value, 4) if finite and not by_text else None
                for position, value in zip(self.positions, likelihood.mean(axis=0).tolist(), strict=True)
            },
        }
        if not finite:  # the first prompt with such a score, and the layer in which it arises
            first = int(np.flatnonzero(~np.isfinite(log_likelihood))[0])
            first = first if prompts is None else int(prompts[first])
            summary["not_finite"] = {"prompt": first, "first_layer": self.first_bad_layer(first, individual, granularities)}
        if prompts is not None:
            summary["raced"] = len(prompts) / self.scorer.num_prompts
        elif self.settings.ga.race and finite:
            summary["values"] = racing.to_text(self._values(correct[None], log_likelihood[None])[0])
        return summary

    def _summary_by_task(
        self,
        individual: Individuals,
        granularities: tuple[Granularity, Granularity],
        correct: np.ndarray,
        log_likelihood: np.ndarray,
    ) -> dict[str, Any]:
        """The same of a mixture: accuracy and log-likelihood are of each task by its title."""
        finite = bool(np.isfinite(log_likelihood).all())
        scale, start, fitness, tie_break = self._tie_break_of_groups(), 0, 0.0, 0.0
        of_tasks: dict[str, dict[str, Any]] = {"accuracy": {}, "log_likelihood": {}}
        for group in self.groups:
            part = slice(start, start + group.count)
            shape, start = (-1, len(group.positions)), start + group.count
            accuracy = correct[part].reshape(shape).mean(axis=0, dtype=np.float64)
            likelihood = log_likelihood[part].reshape(shape).astype(np.float64)
            weights = np.array(group.weights)
            if self.settings.objective.fitness == "log_likelihood":
                fitness += group.share * float(weights @ likelihood.mean(axis=0))
            else:
                probability = np.exp(likelihood / self.scorer.answer_tokens[part].reshape(shape)).mean(axis=0)
                fitness += group.share * float(weights @ accuracy)
                tie_break += group.share * float(weights @ probability)
            means = zip(group.positions, accuracy.tolist(), likelihood.mean(axis=0).tolist(), strict=True)
            for position, right, likely in means:
                of_tasks["accuracy"].setdefault(group.title, {})[str(position)] = right
                of_tasks["log_likelihood"].setdefault(group.title, {})[str(position)] = round(likely, 4) if finite else None
        summary = {"fitness": round(fitness + scale * tie_break, 12) if finite else None, **of_tasks}
        if not finite:
            first = int(np.flatnonzero(~np.isfinite(log_likelihood))[0])
            summary["not_finite"] = {"prompt": first, "first_layer": self.first_bad_layer(first, individual, granularities)}
        return summary

    def _tie_break_of_groups(self) -> float:
        """`tie_break_scale` of all tasks: how far two fitnesses are apart at least, halved; 0 where ties stay."""
        if self.settings.objective.fitness == "log_likelihood" or not self.settings.objective.tie_break:
            return 0.0
        # A verdict of one prompt changes the fitness by one of these; what has no common measure is told apart to a hundredth.
        changes = [
            group.share * weight * len(group.positions) / group.count
            for group in self.groups
            for weight in group.weights
            if weight > 0
        ]
        fractions = [Fraction(change).limit_denominator(10**6) for change in changes]
        denominator = math.lcm(*(fraction.denominator for fraction in fractions))
        common = math.gcd(*(int(fraction * denominator) for fraction in fractions)) / denominator
        return max(common, min(changes) / 100) / 2

    def _values(self, correct: np.ndarray, log_likelihood: np.ndarray) -> Float[np.ndarray, "P U"]:
        """What a race compares: values of its units, whose mean is the fitness; NaN where a score is not finite."""
        scorer, weights = self.scorer, np.array(self.weights)
        assert isinstance(scorer, StagedScorer)
        shape = len(correct), -1, len(self.positions)
        likelihood = np.where(np.isfinite(log_likelihood), log_likelihood, np.nan).astype(np.float64)
        if self.settings.objective.fitness == "log_likelihood":
            of_prompts = likelihood
        else:
            questions = correct.shape[1] // len(self.positions)
            scale = tie_break_scale(self.weights, questions) if self.settings.objective.tie_break else 0.0
            of_prompts = correct + scale * np.exp(likelihood / scorer.answer_tokens)
        return scorer.by_unit(of_prompts.reshape(shape) @ weights)

    def _most_of_a_prompt(self) -> float:
        """How much one verdict changes the value of a unit."""
        scorer = self.scorer
        assert isinstance(scorer, StagedScorer)
        return 0.0 if self.settings.objective.fitness == "log_likelihood" else scorer.of_question * max(self.weights)


def _told(record: dict[str, Any]) -> str:
    """A record without finite scores in words: its factors, and where it goes wrong."""
    where, who = record["not_finite"], f"individual {record['id']}, " if "id" in record else ""
    numbers = ", ".join(f"{name} {shown(array_of(record[name]))}" for name in ("factors", "gains") if name in record)
    return f"{who}{numbers}: first {describe_layer(where['first_layer'])}, at prompt {where['prompt']}"


def _count(records: Sequence[dict[str, Any]]) -> str:
    bad = sum(record["fitness"] is None for record in records)
    return f"{bad} of {len(records)} have scores that are not finite"


def tie_break_scale(weights: Sequence[float], examples: int) -> float:
    """Half of the smallest difference that two weighted accuracies can have: what is added for likelihood stays below it.

    Weights are taken as decimals; two accuracies differ by a multiple of their greatest common divisor over `examples`.
    """
    fractions = [Fraction(str(weight)) for weight in weights if weight > 0]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    return math.gcd(*(int(fraction * denominator) for fraction in fractions)) / denominator / examples / 2


def groups_of(
    titles: Sequence[str],
    shares: Sequence[float],
    places: Sequence[Sequence[tuple[int, int]]],
    prompts: Sequence[Sequence[Prompt]],
    weights: tuple[float, ...],
) -> list[Group]:
    """The tasks of a mixture; one without positions has the weight 1 there."""
    groups = []
    for title, share, of_task, asked in zip(titles, shares, places, prompts, strict=True):
        positions = tuple(position for _, position in of_task)
        own = weights if len(positions) == len(weights) else (1.0,)
        groups.append(Group(title, len(asked), positions, own, share))
    return groups


def search_prompts(
    settings: SearchSettings,
    config: LlamaConfig,
    task: Task,
    tokenizer: Any,
    examples: Sequence[Any],
    places: Sequence[tuple[int, int]],
    counts: Counter[str],
) -> list[Prompt]:
    """The prompts that a task's search examples are scored on, question by question; `counts` gets those of `count_leaky`.

    Raises UserError where the task cannot be scored in the way that is asked for.
    """
    by_text = settings.objective.fitness == "metric" and task.decided_by == "generation"
    prompts = [task.prompt(example, *place) for example in examples for place in places]
    prompts, of_task = count_leaky(prompts, settings.questions.drop_leaky)
    counts.update(of_task)
    prompts = fit(settings, config, task, tokenizer, prompts, by_text)
    if not by_text and not task_prompts.short_answers(prompts):
        wanted = "--algorithm gradient" if settings.algorithm == "gradient" else f"--fitness {settings.objective.fitness}"
        raise UserError(f"{wanted}: --task {task.name} has no short answers to expect; use --fitness metric")
    return prompts


def make_scorer(
    settings: SearchSettings,
    model: Llama,
    tokenizer: Any,
    tasks: Sequence[Task],
    prompts: Sequence[Sequence[Prompt]],
    stop_ids: Sequence[int],
) -> Scorer | OptionScorer | GeneratedScorer | StagedScorer | JoinedScorer:
    """What scores the search prompts of all tasks: by generated text tasks of one kind alone.

    Raises UserError for too few to race on.
    """
    everything, task = [prompt for of_task in prompts for prompt in of_task], tasks[0]
    if settings.objective.fitness == "metric" and task.decided_by != "options":
        metric, new_tokens = task.metrics[0], _new_tokens(settings, task)

        def score(output: str, prompt: Prompt) -> float:
            return task.score(task_prompts.before_stop(output, task.stop), prompt)[metric]

        return GeneratedScorer(
            model,
            tokenizer,
            everything,
            score,
            max_new_tokens=new_tokens,
            stop_ids=stop_ids,
            batch_size=settings.devices.batch_size,
        )

    def of_prompts(chosen: Sequence[int], decided_by: str = task.decided_by) -> Scorer | OptionScorer:
        asked = [everything[at] for at in chosen]
        if decided_by == "options":
            return OptionScorer(placed, tokenizer, asked, batch_size=settings.devices.batch_size, individuals=individuals)
        encoded = task_prompts.encode(asked, tokenizer, model.config.max_position_embeddings)
        return Scorer(
            placed,
            encoded,
            batch_size=settings.devices.batch_size,
            population_chunk=settings.devices.population_chunk,
            individuals=individuals,
        )

    of_algorithm = settings.ga.max_evaluations
    if of_algorithm is None:
        of_algorithm = settings.ga.population_size * (settings.ga.generations + 1)
    individuals = settings.objective.uniform_candidates + (0 if settings.algorithm == "gradient" else of_algorithm)
    placed = model
    kinds = [it.decided_by for it, of_task in zip(tasks, prompts, strict=True) for _ in of_task]
    if len(set(kinds)) > 1:
        runs = [list(run) for _, run in itertools.groupby(range(len(kinds)), lambda at: kinds[at])]
        return JoinedScorer([of_prompts(run, kinds[run[0]]) for run in runs])
    if not settings.ga.race:
        return of_prompts(range(len(everything)))
    placed = put_model(model, mesh_of(model) or make_mesh())  # once, for all parts
    places, units, questions = len(settings.objective.search_positions) if task.num_items > 1 else 1, [], 0
    for of_task in prompts:
        first = task_prompts.token_ids(tokenizer, [prompt.text for prompt in of_task[::places]])
        units.append([[questions + at for at in unit] for unit in racing.units_of(first)])
        questions += len(first)
    return StagedScorer(of_prompts, racing.eighths(units, settings.run.seed), places)


def fit(
    settings: SearchSettings, config: LlamaConfig, task: Task, tokenizer: Any, prompts: Sequence[Prompt], generates: bool
) -> list[Prompt]:
    """The prompts as they fit the window. Raises UserError for those that do not, by `--overlength`."""
    fitted = task_prompts.fit(
        prompts,
        tokenizer,
        config.max_position_embeddings,
        max_prompt_tokens=task.max_prompt_tokens,
        new_tokens=_new_tokens(settings, task) if generates else 0,
        overlength=settings.questions.overlength,
    )
    if prompts and not fitted.prompts:
        raise UserError("--overlength skip leaves out all questions; use fewer items a prompt")
    return fitted.prompts


def _new_tokens(settings: SearchSettings, task: Task) -> int:
    return task.max_new_tokens if settings.questions.max_new_tokens is None else settings.questions.max_new_tokens


def rounded(factors: Float[np.ndarray, "L *units"]) -> list:
    """Factors as the history has them; null for one that is infinite."""
    return json_of(np.round(factors.astype(np.float64), 7))
