"""Scores individuals on the search examples, each different one once.

objective.py makes the fitness of the scores. A race (racing.py) scores hopeless individuals on only a part of the examples.

Letters: P population, L layers, n prompts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from lpes_jax.errors import UserError
from lpes_jax.factors import array_of
from lpes_jax.finite import WAY_OUT, describe_layer, shown
from lpes_jax.report.progress import SearchProgress
from lpes_jax.rope import Granularity
from lpes_jax.scores import PopulationScorer, Scores
from lpes_jax.search import racing
from lpes_jax.search.individuals import Individuals
from lpes_jax.search.objective import Objective
from lpes_jax.search.racing import Bar, Race

# The scores of an individual in the history; the last three are optional. `raced` is the share of the examples on which it was
# scored before a race dropped it: its accuracies are on these, and its fitness is an estimate. A race compares others with
# `values`.
SCORES = ("fitness", "accuracy", "log_likelihood", "not_finite", "raced", "values")

# (prompt, individual or None for the model without factors, granularities) -> layer
FindLayer = Callable[[int, Individuals | None, tuple[Granularity, Granularity]], int | str | None]


class Evaluator:
    """Gives individuals their fitness, accuracy and log-likelihood, as the history has them (a *summary*).

    Args:
        scorer: The scorer of the search examples.
        objective: Makes the fitness.
        first_bad_layer: Finds the layer where a score became NaN or infinite (`lpes_jax.finite`).
        granularities: Those of factors and gains.
        progress: Gets the number of finished (individual, prompt) pairs.
        race: Scores generations in stages; None: all individuals are scored on all examples.

    Attributes:
        evaluations: The number of individuals that the model scored, on all examples or in a race.
    """

    def __init__(
        self,
        scorer: PopulationScorer,
        objective: Objective,
        first_bad_layer: FindLayer,
        granularities: tuple[Granularity, Granularity],
        progress: SearchProgress,
        race: Race | None = None,
    ):
        self.scorer, self.objective, self.race = scorer, objective, race
        self.first_bad_layer, self.granularities, self.progress = first_bad_layer, granularities, progress
        self.evaluations = 0
        self._prompts_saved = 0
        self._prompts_checked: set[int] = set()  # on which the model without factors is finite
        self._known: dict[tuple, dict[str, Any]] = {}

    @property
    def prompts_scored(self) -> int:
        """(individual, prompt) pairs that the model scored."""
        return self.evaluations * self.scorer.num_prompts - self._prompts_saved

    def knows(self, key: tuple) -> bool:
        """Whether an individual with this key has a summary."""
        return key in self._known

    def replay(self, keys: Sequence[tuple], records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The summaries in lines of a resumed run's history, which are then known and count as scored."""
        new = [record for record in records if not record["cached"]]
        self.count_earlier(len(new))
        self._prompts_saved += sum(round((1 - record.get("raced", 1)) * self.scorer.num_prompts) for record in new)
        self.progress.skip(len(records) * self.scorer.num_prompts)
        summaries = [{name: record[name] for name in SCORES if name in record} for record in records]
        self._known |= zip(keys, summaries, strict=False)
        return summaries

    def count_earlier(self, evaluations: int) -> None:
        """Count individuals that a run scored before it was resumed."""
        self.evaluations += evaluations

    def score_factors(
        self, factors: Float[np.ndarray, "P L *units"], granularity: Granularity = "layer"
    ) -> list[dict[str, Any]]:
        """Fitness, accuracy and log-likelihood of factors on all examples; those already known are not scored again."""
        individuals = Individuals(factors)
        for key in (Individuals(row).key for row in factors):
            if "raced" in self._known.get(key, {}):
                del self._known[key]
        return [
            {name: value for name, value in summary.items() if name != "values"}
            for summary in self.summaries(individuals, granularities=(granularity, "layer"))
        ]

    def check_model(self, when: str, records: Sequence[dict[str, Any]]) -> None:
        """Raise UserError if scores of individuals are not finite, and those of the model without factors are not either."""
        for prompt in [record["not_finite"]["prompt"] for record in records if record["fitness"] is None]:
            if prompt in self._prompts_checked:
                continue
            self._prompts_checked.add(prompt)
            if (layer := self.first_bad_layer(prompt, None, ("layer", "layer"))) is not None:
                raise UserError(
                    f"{when}: {not_finite_of(records)}: the model's logits are not finite, without factors too: "
                    f"first {describe_layer(layer)}, at prompt {prompt}; {WAY_OUT}"
                )

    def check_any(self, when: str, records: Sequence[dict[str, Any]]) -> None:
        """Raise UserError if no individual has finite scores."""
        if records and all(record["fitness"] is None for record in records):
            way_out = "try --dtype float32, or factors nearer to 1 (--min-factor, --max-factor)"
            raise UserError(f"{when}: {not_finite_of(records)}; {in_words(records[0])}; {way_out}")

    def summaries(
        self,
        individuals: Individuals,
        bar: Bar | None = None,
        granularities: tuple[Granularity, Granularity] | None = None,
    ) -> list[dict[str, Any]]:
        """The summaries of individuals. New ones are scored on all examples, or with a bar in a race.

        `granularities`: None means the evaluator's.
        """
        granularities = granularities or self.granularities
        keys = [individuals.select(index).key for index in range(len(individuals.factors))]
        unknown: dict[tuple, int] = {}
        for index, key in enumerate(keys):
            if key not in self._known:
                unknown.setdefault(key, index)
        self.progress.skip((len(keys) - len(unknown)) * self.scorer.num_prompts)
        if unknown:
            rows = individuals.select(list(unknown.values()))
            found = self._scored_on_all(rows, granularities) if bar is None else self._raced(rows, bar)
            self.evaluations += len(unknown)
            self._known |= zip(unknown, found, strict=True)
        return [self._known[key] for key in keys]

    def _scored_on_all(self, rows: Individuals, granularities: tuple[Granularity, Granularity]) -> list[dict[str, Any]]:
        """The summaries of individuals on all examples."""
        scores = self._scores(self.scorer, rows, granularities)
        return [
            self._summary(rows.select(row), granularities, *row_scores)
            for row, row_scores in enumerate(zip(*scores, strict=True))
        ]

    def _raced(self, rows: Individuals, bar: Bar) -> list[dict[str, Any]]:
        """The summaries of a generation's new individuals after their race."""
        race, found = self.race, []
        assert race is not None

        def score(stage: int, chosen: Int[np.ndarray, "n"]) -> Scores:
            return self._scores(partial(race.scorer, stages=[stage]), rows.select(chosen), self.granularities)

        for row, result in enumerate(race.run(score, len(rows.factors), bar)):
            summary = self._summary(rows.select(row), self.granularities, result.correct, result.log_likelihood, result.prompts)
            found.append(summary if result.estimate is None else summary | {"fitness": round(result.estimate, 9)})
            prompts_saved = self.scorer.num_prompts - len(result.correct)
            self._prompts_saved += prompts_saved
            self.progress.skip(prompts_saved)
        return found

    def _scores(
        self, score: Callable[..., Scores], rows: Individuals, granularities: tuple[Granularity, Granularity]
    ) -> Scores:
        """The model's scores of individuals."""
        factors_granularity, gains_granularity = granularities
        gains = {} if rows.gains is None else {"gains": rows.gains, "gains_granularity": gains_granularity}
        return score(rows.factors, factors_granularity, on_prompts=self.progress.prompts, **gains)

    def _summary(
        self,
        individual: Individuals,
        granularities: tuple[Granularity, Granularity],
        correct: np.ndarray,
        log_likelihood: np.ndarray,
        prompts: Int[np.ndarray, "n"] | None = None,
    ) -> dict[str, Any]:
        """The summary of an individual, from its scores on all prompts or on some, given by their indices."""
        summary = self.objective.summary(correct, log_likelihood, prompts)
        finite = summary["fitness"] is not None
        if not finite:  # the first prompt with such a score, and the layer where it arises
            first = int(np.flatnonzero(~np.isfinite(log_likelihood))[0])
            first = first if prompts is None else int(prompts[first])
            summary["not_finite"] = {"prompt": first, "first_layer": self.first_bad_layer(first, individual, granularities)}
        if prompts is not None:
            summary["raced"] = len(prompts) / self.scorer.num_prompts
        elif self.race is not None and finite:
            summary["values"] = racing.to_text(self.race.values(correct[None], log_likelihood[None])[0])
        return summary


def in_words(record: dict[str, Any]) -> str:
    """A record without finite scores, in words: its factors, and the first bad layer."""
    bad, subject = record["not_finite"], f"individual {record['id']}, " if "id" in record else ""
    numbers = ", ".join(f"{name} {shown(array_of(record[name]))}" for name in ("factors", "gains") if name in record)
    return f"{subject}{numbers}: first {describe_layer(bad['first_layer'])}, at prompt {bad['prompt']}"


def not_finite_of(records: Sequence[dict[str, Any]]) -> str:
    """How many of the records have no finite scores, in words."""
    bad = sum(record["fitness"] is None for record in records)
    return f"{bad} of {len(records)} have scores that are not finite"
