"""Racing (`--race`): individuals that can no longer catch up are dropped after a part of the search questions.

A generation is scored in stages: on an eighth of the questions, then on a quarter, on half and on all of them. After each
stage, an individual is dropped if a test says that its fitness on all questions would stay below a bar:

- The genetic algorithm has two bars: its worst parent, and the k-th best of parents and generation together on the questions so
  far. k is the number of parents plus crossovers (only the better child of a crossover can become a parent). An individual
  below either bar never becomes a parent. So a race does not change the rest of a history, unless it drops an individual by
  mistake.
- Random search's bar is the best individual: of all earlier ones, and of the generation on the questions so far.
- evosax's other algorithms learn from a whole generation. Their bar is the generation's own median on the questions so far, so
  half of the generation is scored on all questions.

The test is one-sided and paired by question. Questions are a sample without replacement from all N of the search. So n
differences d to the bar have the standard error s / sqrt(n) * sqrt(1 - n / N), and an individual is dropped if
mean(d) + t(0.95, n - 1) * standard error < 0. One difference in the individual's favour is added, because a few questions that
happen to agree prove little (the idea of Agresti and Coull's interval). It is the largest absolute difference, and at least the
change that one prompt can make.

The test counts units: a question at all its positions, or all questions about one haystack, which share a prefix
(lpes_jax.prefixes) and are not independent. The seed divides the units of each task into eighths.

The fitness of a dropped individual is an estimate, for the record and for algorithms that use it: its mean on the part, plus
the mean gain from the part to the whole of the individuals scored on all questions. It is always below the bar.

Letters: P individuals, R rivals, N prompts, Q questions, U units.
"""

import base64
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import stdtrit

from lpes_jax.errors import UserError
from lpes_jax.prefixes import families
from lpes_jax.rope import Granularity
from lpes_jax.scores import LikelihoodScorer, Scores
from lpes_jax.search.objective import Objective

STAGES = ((0,), (1,), (2, 3), (4, 5, 6, 7))  # the eighths that each stage adds
CONFIDENCE = 0.95
LEAST_UNITS = 12  # half of fewer units is too few for the test to drop anything

Score = Callable[[int, Int[np.ndarray, "chosen"]], Float[np.ndarray, "chosen u"]]


@dataclass(frozen=True)
class Bar:
    """The fitness that the individuals of a generation must reach.

    It is the fitness of the last of the `rivals` (known individuals), if there are any; and with `keep` also that of the
    `keep`-th best of rivals and generation together.
    """

    rivals: Float[np.ndarray, "R U"]
    keep: int = 0

    def references(self, values: Float[np.ndarray, "P n"]) -> list[Float[np.ndarray, "n"]]:
        """The values to compare with on the units so far."""
        rivals = self.rivals[:, : values.shape[1]]
        everyone = np.concatenate([rivals, values])
        order = np.argsort(-everyone.mean(axis=1), kind="stable")
        return [*rivals[-1:], *everyone[order[self.keep - 1 : self.keep]]] if self.keep else [*rivals[-1:]]

    def ceiling(self, finished: Float[np.ndarray, "F U"]) -> float | None:
        """The bar on all units, given the values of a generation's finished individuals. Lower fitnesses do not matter."""
        everyone = np.sort(np.concatenate([self.rivals, finished]).mean(axis=1))[::-1][: self.keep]
        return max([*self.rivals[-1:].mean(axis=1), *everyone[-1:]], default=None)


def race(
    score: Score, individuals: int, bounds: Sequence[int], bar: Bar, least: float = 0.0
) -> tuple[Float[np.ndarray, "P U"], Int[np.ndarray, "P"]]:
    """Race a generation. The mean of an individual's values over all units is its fitness.

    Args:
        score: `score(k, chosen)` gives the values of the chosen individuals on the units of stage k. A value that is NaN or
            infinite ends an individual's race.
        individuals: The number of individuals.
        bounds: Stage k scores the units from `bounds[k]` to `bounds[k + 1]`.
        bar: The bar.
        least: The most that one prompt can change the value of a unit.

    Returns:
        The values of each individual on each unit (0 beyond those scored), and the number of its scored units.
    """
    values, scored, running = np.zeros((individuals, bounds[-1])), np.zeros(individuals, int), np.arange(individuals)
    for stage, (start, end) in enumerate(itertools.pairwise(bounds)):
        if len(running):
            values[running, start:end] = score(stage, running)
            scored[running] = end
            running = running[np.isfinite(values[running, :end]).all(axis=1)]
        if end < bounds[-1]:
            so_far = values[running, :end]
            dropped = [hopeless(so_far, reference, bounds[-1], least) for reference in bar.references(so_far)]
            running = running[~np.any(dropped, axis=0)] if dropped else running
    return values, scored


def hopeless(
    values: Float[np.ndarray, "P n"], reference: Float[np.ndarray, "n"], units: int, least: float = 0.0
) -> Bool[np.ndarray, "P"]:
    """Which individuals would stay below the reference on all `units`, by the test above on n of them."""
    differences = values - reference
    strongest = np.maximum(np.abs(differences).max(axis=1, initial=0.0), least)
    differences = np.column_stack([differences, strongest])
    n = values.shape[1]
    error = differences.std(axis=1, ddof=1) / np.sqrt(n + 1) * np.sqrt(1 - n / units)
    return differences.mean(axis=1) + stdtrit(n, CONFIDENCE) * error < 0


def estimates(values: Float[np.ndarray, "P U"], scored: Int[np.ndarray, "P"], bar: Bar) -> dict[int, float]:
    """The estimated fitness of the individuals that a race dropped, by their indices: see above."""
    whole, finite = scored == values.shape[1], np.isfinite(values).all(axis=1)
    finished, found = values[whole & finite], {}
    known, ceiling = np.concatenate([bar.rivals, finished]), bar.ceiling(finished)
    for individual in np.flatnonzero(~whole & finite):
        part = slice(scored[individual])
        estimate = values[individual, part].mean()
        if ceiling is not None:
            gained = (known.mean(axis=1) - known[:, part].mean(axis=1)).mean()
            estimate = min(estimate + gained, ceiling - 1e-6 * max(1.0, abs(ceiling)))  # below it also in float32
        found[int(individual)] = float(estimate)
    return found


def to_text(values: Float[np.ndarray, "U"]) -> str:
    """Values as the history has them: float32, so that a resumed run compares with the same numbers."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def from_text(text: str) -> Float[np.ndarray, "U"]:
    """The inverse of `to_text`."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float64)


def units_of(first_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Groups of dependent questions: their first prompts share most of what follows the prefix of all prompts."""
    header = len(os.path.commonprefix(list(map(list, first_ids))))  # instructions, or examples
    return families([(list(ids[header:]), [0]) for ids in first_ids])


def eighths(tasks: Sequence[Sequence[Sequence[int]]], seed: int) -> list[list[list[int]]]:
    """The units of several tasks, divided at random into eight parts with about equally many of each task.

    Raises UserError if half of the units are too few to drop anything.
    """
    if (fewest := min(map(len, tasks))) < LEAST_UNITS:
        noun = "questions" if all(len(unit) == 1 for task_units in tasks for unit in task_units) else "haystacks"
        raise UserError(
            f"--race: {fewest} {noun} are too few to drop anything on a part of them; raise --limit (from {LEAST_UNITS} on), "
            "or leave --race out"
        )
    rng = np.random.default_rng(seed % 2**32)
    parts: list[list[list[int]]] = [[] for _ in range(8)]
    for task_units in tasks:
        ends = np.arange(9) * len(task_units) // 8  # even: a quarter and a half are exact
        for part, chosen in zip(parts, np.split(rng.permutation(len(task_units)), ends[1:-1]), strict=True):
            part += [list(task_units[unit]) for unit in sorted(chosen)]
    return parts


class StagedScorer:
    """One scorer per eighth of the prompts, all with the same RoPE table.

    `parts` are units of questions; a question has `per_question` consecutive prompts. `make` makes the scorer of some prompts,
    given their indices.
    """

    has_likelihood = True

    def __init__(self, make: Callable[[list[int]], LikelihoodScorer], parts: list[list[list[int]]], per_question: int):
        units = list(itertools.chain(*parts))
        self._starts = np.cumsum([0, *map(len, units[:-1])])
        self._questions = np.concatenate(units).astype(int)  # unit by unit
        self.question_scale = len(units) / len(self._questions)
        ends = np.cumsum([0, *map(len, parts)])
        self.bounds = [0, *(int(ends[stage[-1] + 1]) for stage in STAGES)]
        self._prompts = [
            np.array([question * per_question + i for unit in part for question in sorted(unit) for i in range(per_question)])
            for part in parts
        ]
        self._scorers = [make(prompts.tolist()) for prompts in self._prompts]
        self.longest = max(scorer.longest for scorer in self._scorers)
        for scorer in self._scorers:
            scorer.lengthen(self.longest)
        self.num_prompts = sum(map(len, self._prompts))
        self.answer_tokens = np.zeros(self.num_prompts, int)
        for prompts, scorer in zip(self._prompts, self._scorers, strict=True):
            self.answer_tokens[prompts] = scorer.answer_tokens

    @property
    def individuals_at_once(self) -> int:
        return max(scorer.individuals_at_once for scorer in self._scorers)

    def prompts_of(self, stages: int) -> Int[np.ndarray, "n"]:
        """The indices of the prompts of the first `stages` stages of a race."""
        return np.sort(np.concatenate([self._prompts[part] for stage in STAGES[:stages] for part in stage]))

    def __call__(
        self,
        factors: Float[np.ndarray, "P ..."],
        granularity: Granularity = "layer",
        on_prompts: Callable[[int], None] = lambda count: None,
        stages: Sequence[int] = range(len(STAGES)),
        *,
        gains: Float[np.ndarray, "P ..."] | None = None,
        gains_granularity: Granularity = "layer",
    ) -> Scores:
        """As `Scorer.__call__`, but only for the prompts of `stages`; the scores of others are 0."""
        shape = len(factors), self.num_prompts
        scores = Scores(np.zeros(shape, bool), np.zeros(shape, np.float32))
        more: dict[str, Any] = {} if gains is None else {"gains": gains, "gains_granularity": gains_granularity}
        for part in itertools.chain(*(STAGES[stage] for stage in stages)):
            new = self._scorers[part](factors, granularity, on_prompts, **more)
            for column, new_column in zip(scores, new, strict=True):
                column[:, self._prompts[part]] = new_column
        return scores

    def by_unit(self, by_question: Float[np.ndarray, "P Q"]) -> Float[np.ndarray, "P U"]:
        """Sums over units, scaled so that their mean is the mean over questions, and rounded to float32."""
        sums = np.add.reduceat(by_question[:, self._questions], self._starts, axis=1)
        return (sums * self.question_scale).astype(np.float32).astype(np.float64)


@dataclass(frozen=True)
class RaceResult:
    """The result of one individual's race: its scores, and the indices of their prompts (None: all prompts).

    `estimate` is its fitness if it was dropped and its scores are finite.
    """

    correct: Bool[np.ndarray, "n"]
    log_likelihood: Float[np.ndarray, "n"]
    prompts: Int[np.ndarray, "n"] | None
    estimate: float | None


@dataclass(frozen=True)
class Race:
    """Races the generations of a search: scores in stages, compared by their contributions to the fitness."""

    scorer: StagedScorer
    objective: Objective

    def values(self, correct: Bool[np.ndarray, "P N"], log_likelihood: Float[np.ndarray, "P N"]) -> Float[np.ndarray, "P U"]:
        """The values of the units, whose mean is the fitness; NaN if a score is not finite."""
        return self.scorer.by_unit(self.objective.by_question(correct, log_likelihood))

    def bar(self, rivals: Sequence[str], keep: int) -> Bar:
        """The bar for rivals, given by their values in the history. Raises ValueError for values of another race."""
        return Bar(np.array([from_text(text) for text in rivals]).reshape(len(rivals), self.scorer.bounds[-1]), keep)

    def run(self, score: Callable[[int, Int[np.ndarray, "n"]], Scores], individuals: int, bar: Bar) -> list[RaceResult]:
        """Race individuals. `score(stage, chosen)` gives the scores of the chosen on a stage's prompts, and 0 for others."""
        scorer = self.scorer
        shape = individuals, scorer.num_prompts
        correct, log_likelihood = np.zeros(shape, bool), np.zeros(shape, np.float32)

        def unit_values(stage: int, chosen: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n u"]:
            new = score(stage, chosen)
            correct[chosen] |= new.correct
            log_likelihood[chosen] += new.log_likelihood
            return self.values(*new)[:, scorer.bounds[stage] : scorer.bounds[stage + 1]]

        least = scorer.question_scale * self.objective.most_of_a_verdict
        values, scored = race(unit_values, individuals, scorer.bounds, bar, least)
        estimated = estimates(values, scored, bar)
        results = []
        for individual in range(individuals):
            prompts = scorer.prompts_of(scorer.bounds.index(scored[individual]))
            scores = correct[individual, prompts], log_likelihood[individual, prompts]
            part = None if len(prompts) == scorer.num_prompts else prompts
            results.append(RaceResult(*scores, part, estimated.get(individual)))
        return results
