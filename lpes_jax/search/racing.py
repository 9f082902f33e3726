"""Racing (`--race`): individuals that cannot catch up any more are dropped on a part of the search questions.

A generation is scored in stages: on an eighth of the questions, then on a quarter, on half and on all of them. In between, an
individual is dropped where a test says that its fitness on all questions would stay below a bar:

- The genetic algorithm's bars are its worst parent, and, of parents and generation together on the part so far, the last of so
  many as there are parents (and crossovers, of which only the better child can be one). What stays below is never bred from
  and leaves no trace: a race changes nothing in the rest of a history, but for an individual that is dropped by mistake.
- Random search's bar is the best, so far and on the part.
- The bar of evosax's other algorithms, which learn from a whole generation, is the generation's own middle on the part: half of
  it is scored on all questions.

The test is one-sided and paired by question. Questions are a sample without replacement from all N of the search, so n
differences d to the bar have the standard error s / sqrt(n) * sqrt(1 - n / N), and an individual is dropped where
mean(d) + t(0.95, n - 1) * standard error < 0. One more difference is added that speaks for the individual as strongly as any
seen speaks for either, and at least as one prompt can: a few questions that happen to agree prove little (the idea of Agresti
and Coull's interval).

What is counted are units: a question at all its positions, or all questions about one haystack, which share their prompts'
beginnings (lpes_jax.prefixes) and are not independent. The seed draws them into eighths, of each task alike.

The fitness of what was dropped is an estimate, for the record and for those of evosax's algorithms that look at it: its mean on
the part, plus what those that were scored on all questions gained from the part to the whole; never up to the bar.

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
from lpes_jax.scoring import OptionScorer, Scorer, Scores

STAGES = ((0,), (1,), (2, 3), (4, 5, 6, 7))  # the eighths that each stage adds
CONFIDENCE = 0.95
LEAST_UNITS = 12  # half of less cannot drop anything

Score = Callable[[int, Int[np.ndarray, "chosen"]], Float[np.ndarray, "chosen u"]]


@dataclass(frozen=True)
class Bar:
    """What the individuals of a generation must reach to matter.

    The fitness of the last of the `rivals`, known individuals, where there are any; and with `keep` that of the `keep`-th best
    of rivals and generation together.
    """

    rivals: Float[np.ndarray, "R U"]
    keep: int = 0

    def references(self, values: Float[np.ndarray, "P n"]) -> list[Float[np.ndarray, "n"]]:
        """What to compare with on the units so far."""
        rivals = self.rivals[:, : values.shape[1]]
        everyone = np.concatenate([rivals, values])
        order = np.argsort(-everyone.mean(axis=1), kind="stable")
        return [*rivals[-1:], *everyone[order[self.keep - 1 : self.keep]]] if self.keep else [*rivals[-1:]]

    def ceiling(self, finished: Float[np.ndarray, "F U"]) -> float | None:
        """The fitness that is sure not to matter, with those of a generation that were scored on all units."""
        everyone = np.sort(np.concatenate([self.rivals, finished]).mean(axis=1))[::-1][: self.keep]
        return max([*self.rivals[-1:].mean(axis=1), *everyone[-1:]], default=None)


def race(
    score: Score, individuals: int, bounds: Sequence[int], bar: Bar, least: float = 0.0
) -> tuple[Float[np.ndarray, "P U"], Int[np.ndarray, "P"]]:
    """The values of each individual on each unit, and on how many of the units it was scored; values beyond are 0.

    Stage k scores the units from `bounds[k]` to `bounds[k + 1]`: `score(k, chosen)` gives the values of the chosen individuals,
    NaN or infinite where a score is not finite, which ends an individual's race. The mean over all units is the fitness;
    `least` is what one prompt can change in one unit.
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
    """Which individuals stay below the reference on all `units`, by the test above, as far as n of them tell."""
    differences = values - reference
    strongest = np.maximum(np.abs(differences).max(axis=1, initial=0.0), least)
    differences = np.column_stack([differences, strongest])
    n = values.shape[1]
    error = differences.std(axis=1, ddof=1) / np.sqrt(n + 1) * np.sqrt(1 - n / units)
    return differences.mean(axis=1) + stdtrit(n, CONFIDENCE) * error < 0


def estimates(values: Float[np.ndarray, "P U"], scored: Int[np.ndarray, "P"], bar: Bar) -> dict[int, float]:
    """The fitness of the individuals that a race dropped, by their numbers: see above."""
    whole, finite = scored == values.shape[1], np.isfinite(values).all(axis=1)
    finished, found = values[whole & finite], {}
    known, ceiling = np.concatenate([bar.rivals, finished]), bar.ceiling(finished)
    for at in np.flatnonzero(~whole & finite):
        part = slice(scored[at])
        estimate = values[at, part].mean()
        if ceiling is not None:
            gained = (known.mean(axis=1) - known[:, part].mean(axis=1)).mean()
            estimate = min(estimate + gained, ceiling - 1e-6 * max(1.0, abs(ceiling)))  # below it in float32, too
        found[int(at)] = float(estimate)
    return found


def to_text(values: Float[np.ndarray, "U"]) -> str:
    """Values as the history keeps them, float32: a run that is resumed compares with the same numbers."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def from_text(text: str) -> Float[np.ndarray, "U"]:
    """What `to_text` wrote."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float64)


def units_of(first_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Questions that are no independent draws together: those whose first prompts share most of what not all share."""
    header = len(os.path.commonprefix(list(map(list, first_ids))))  # instructions, or examples
    return families([(list(ids[header:]), [0]) for ids in first_ids])


def eighths(of_tasks: Sequence[Sequence[Sequence[int]]], seed: int) -> list[list[list[int]]]:
    """The units of several tasks, drawn into eight parts that have about as much of each task.

    Raises UserError where there are too few to drop anything on half of them.
    """
    if (units := min(map(len, of_tasks))) < LEAST_UNITS:
        what = "questions" if all(len(unit) == 1 for of_task in of_tasks for unit in of_task) else "haystacks"
        raise UserError(
            f"--race: {units} {what} are too few to drop anything on a part of them; raise --limit (from {LEAST_UNITS} on), or "
            "leave --race out"
        )
    rng = np.random.default_rng(seed % 2**32)
    parts: list[list[list[int]]] = [[] for _ in range(8)]
    for of_task in of_tasks:
        ends = np.arange(9) * len(of_task) // 8  # even: a quarter and a half have what they should
        for part, chosen in zip(parts, np.split(rng.permutation(len(of_task)), ends[1:-1]), strict=True):
            part += [list(of_task[at]) for at in sorted(chosen)]
    return parts


class StagedScorer:
    """A scorer for each eighth of the prompts, in the place of one of all; all by the same RoPE table.

    `parts` are units of questions; a question has `places` prompts in turn. `make` makes the scorer of some prompts, by their
    numbers.
    """

    def __init__(self, make: Callable[[list[int]], Scorer | OptionScorer], parts: list[list[list[int]]], places: int):
        units = list(itertools.chain(*parts))
        self._starts = np.cumsum([0, *map(len, units[:-1])])
        self._questions = np.concatenate(units).astype(int)  # unit by unit
        self.of_question = len(units) / len(self._questions)
        ends = np.cumsum([0, *map(len, parts)])
        self.bounds = [0, *(int(ends[stage[-1] + 1]) for stage in STAGES)]
        self._prompts = [
            np.array([question * places + at for unit in part for question in sorted(unit) for at in range(places)])
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
        """The prompts that the first `stages` of a race ask."""
        return np.sort(np.concatenate([self._prompts[at] for stage in STAGES[:stages] for at in stage]))

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
        """As `Scorer`'s; of the prompts of some stages alone, where they are named, and 0 for the others."""
        shape = len(factors), self.num_prompts
        scores = Scores(np.zeros(shape, bool), np.zeros(shape, np.float32))
        more: dict[str, Any] = {} if gains is None else {"gains": gains, "gains_granularity": gains_granularity}
        for at in itertools.chain(*(STAGES[stage] for stage in stages)):
            new = self._scorers[at](factors, granularity, on_prompts, **more)
            for whole, part in zip(scores, new, strict=True):
                whole[:, self._prompts[at]] = part
        return scores

    def by_unit(self, by_question: Float[np.ndarray, "P Q"]) -> Float[np.ndarray, "P U"]:
        """Sums over units, times `of_question`: their mean is the mean over questions. float32's numbers."""
        sums = np.add.reduceat(by_question[:, self._questions], self._starts, axis=1)
        return (sums * self.of_question).astype(np.float32).astype(np.float64)
