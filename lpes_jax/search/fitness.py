"""The fitness of individuals on the search examples, and the history of a run.

objective.py defines the fitness. Individuals with the same factors and gains are scored only once. A race (racing.py) scores
hopeless ones on only a part of the examples.

Letters: P population, L layers, n prompts.
"""

import sys
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
from lpes_jax.search.stop import BudgetSpent, GracefulStop
from lpes_jax.store.run_folder import RunFolder

# The scores of an individual in the history; the last three are optional. `raced` is the share of the examples on which it was
# scored before a race dropped it: its accuracies are on these, and its fitness is an estimate. A race compares others with
# `values`.
SCORES = ("fitness", "accuracy", "log_likelihood", "not_finite", "raced", "values")


# (prompt, individual or None for the model without factors, granularities) -> layer
Trace = Callable[[int, Individuals | None, tuple[Granularity, Granularity]], int | str | None]


class Fitness:
    """Scores generations and keeps the history: `records` are the lines of history.jsonl.

    `first_bad_layer` finds the layer where a score became NaN or infinite (`lpes_jax.finite`). `granularities` are those of
    factors and gains. `max_evaluations` (None: no bound) is the most individuals that are scored. Without a `race` all are
    scored on all examples. `score_dtype` (None: the model's) is that of the scorer's products, and is in each line.
    """

    def __init__(
        self,
        scorer: PopulationScorer,
        objective: Objective,
        first_bad_layer: Trace,
        granularities: tuple[Granularity, Granularity],
        folder: RunFolder,
        progress: SearchProgress,
        stop: GracefulStop,
        max_evaluations: int | None = None,
        race: Race | None = None,
        score_dtype: str | None = None,
    ):
        self.scorer, self.objective, self.race = scorer, objective, race
        self._scored_in = {} if score_dtype is None else {"score_dtype": score_dtype}
        self.folder, self.progress, self.stop = folder, progress, stop
        self.first_bad_layer, self.granularities, self.max_evaluations = first_bad_layer, granularities, max_evaluations
        self.records: list[dict[str, Any]] = []
        self.evaluations = 0  # individuals that the model scored, on all examples or in a race: those not seen before
        self._prompts_saved = 0
        self._traced: set[int] = set()  # prompts on which the model without factors is finite
        self._seen: dict[tuple, dict[str, Any]] = {}

    @property
    def best(self) -> dict[str, Any]:
        """The fittest individual (the first of equals). It was scored on all examples."""
        return max(self.records, key=lambda record: -np.inf if record["fitness"] is None else record["fitness"])

    @property
    def prompts_scored(self) -> int:
        """(individual, prompt) pairs that the model scored."""
        return self.evaluations * self.scorer.num_prompts - self._prompts_saved

    def generation(
        self,
        number: int,
        generations: int,
        drafts: list[dict[str, Any]],
        individuals: Individuals,
        *,
        rivals: Sequence[int] = (),
        keep: int = 0,
    ) -> Float[np.ndarray, "P"]:
        """The fitness of a generation (NaN if a score is not finite). Adds a line of history for each individual.

        Args:
            number: The number of the generation.
            generations: The number of all generations.
            drafts: The lines of history without numbers and scores.
            individuals: The individuals.
            rivals: The ids of the rivals of a race's bar (`racing.Bar`).
            keep: The `keep` of a race's bar. Without rivals and `keep` there is no race.

        Raises:
            BudgetSpent: `--max-evaluations` individuals are scored, and none beyond. In a race each counts as one.
            UserError: No score is finite, so the search cannot continue.
        """
        best = f"best {self.best['fitness']:.4f}" if self.records and self.best["fitness"] is not None else ""
        self.progress.note(f"generation {number}/{generations}  {best}")
        before = len(self.records)
        bar = self._bar(rivals, keep)
        block_size = len(drafts) if bar else self.scorer.individuals_at_once  # blocks must not decide who is dropped
        for start in range(0, len(drafts), block_size):
            block = slice(start, start + block_size)
            self._block(drafts[block], individuals.select(block), bar)
            self.check_model(f"generation {number}", self.records[before:])
        made = self.records[before:]
        self.check_any(f"generation {number}", made)
        if bad := [record for record in made if record["fitness"] is None]:
            print(f"note: generation {number}: {_count(made)}; {_told(bad[0])}", file=sys.stderr)
        return np.array([np.nan if record["fitness"] is None else record["fitness"] for record in made])

    def check_model(self, when: str, made: Sequence[dict[str, Any]]) -> None:
        """Raise UserError if scores of individuals are not finite, and those of the model without factors are not either."""
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
        """Raise UserError if no individual has finite scores."""
        if made and all(record["fitness"] is None for record in made):
            way_out = "try --dtype float32, or factors nearer to 1 (--min-factor, --max-factor)"
            raise UserError(f"{when}: {_count(made)}; {_told(made[0])}; {way_out}")

    def score_factors(
        self, factors: Float[np.ndarray, "P L *units"], granularity: Granularity = "layer"
    ) -> list[dict[str, Any]]:
        """Fitness, accuracy and log-likelihood of factors on all examples; those already known are not scored again."""
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
        """The scores of individuals for the history. New ones are scored on all examples, or in a race to a bar."""
        keys = [individuals.select(index).key for index in range(len(individuals.factors))]
        unseen: dict[tuple, int] = {}
        for index, key in enumerate(keys):
            if key not in self._seen:
                unseen.setdefault(key, index)
        self.progress.skip((len(keys) - len(unseen)) * self.scorer.num_prompts)
        if unseen:
            rows = individuals.select(list(unseen.values()))
            found = self._scored_on_all(rows, granularities) if bar is None else self._raced(rows, bar)
            self.evaluations += len(unseen)
            self._seen |= zip(unseen, found, strict=True)
        return [self._seen[key] for key in keys]

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
            self._save(self.scorer.num_prompts - len(result.correct))
        return found

    def _scores(
        self, score: Callable[..., Scores], rows: Individuals, granularities: tuple[Granularity, Granularity]
    ) -> Scores:
        """The model's scores of individuals."""
        factors_granularity, gains_granularity = granularities
        gains = {} if rows.gains is None else {"gains": rows.gains, "gains_granularity": gains_granularity}
        return score(rows.factors, factors_granularity, on_prompts=self.progress.prompts, **gains)

    def _bar(self, rivals: Sequence[int], keep: int) -> Bar | None:
        """The bar of a generation's race. None without a race, and if a rival has no finite scores on all examples."""
        values = [self.records[rival].get("values") for rival in rivals]
        if self.race is None or not (rivals or keep) or None in values:
            return None
        try:
            return self.race.bar([text for text in values if text], keep)
        except ValueError as error:
            raise UserError(
                f"--resume: the values of an individual in {self.folder.history_path} are not those of a race; give another "
                "--output-path"
            ) from error

    def _save(self, prompts: int) -> None:
        self._prompts_saved += prompts
        self.progress.skip(prompts)

    def _block(self, drafts: list[dict[str, Any]], individuals: Individuals, bar: Bar | None) -> None:
        rows = [individuals.select(index) for index in range(len(drafts))]
        keys = [row.key for row in rows]
        cached = [key in self._seen or key in keys[:index] for index, key in enumerate(keys)]
        fits = self._within_budget(cached)
        drafts = [
            draft | row.record | self._scored_in | {"cached": known}
            for draft, row, known in zip(drafts[:fits], rows, cached, strict=False)
        ]
        parts = self.objective.accuracy_keys
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
        else:  # an incomplete block is scored again as a whole: the last digit of likelihoods may depend on the block
            summaries = self._summaries(individuals.select(slice(fits)), self.granularities, bar)
        records = recorded + [draft | summary for draft, summary in zip(drafts, summaries, strict=True)][len(recorded) :]
        self.folder.append(records[len(recorded) :])
        self.records += records
        self.stop.check()
        if fits < len(cached) or self.evaluations == self.max_evaluations:
            raise BudgetSpent

    def _within_budget(self, cached: list[bool]) -> int:
        """The number of individuals, from the first, that the remaining evaluations suffice for."""
        if self.max_evaluations is None:
            return len(cached)
        needed = np.cumsum([not known for known in cached])
        return int((needed <= self.max_evaluations - self.evaluations).sum())

    def _summary(
        self,
        individual: Individuals,
        granularities: tuple[Granularity, Granularity],
        correct: np.ndarray,
        log_likelihood: np.ndarray,
        prompts: Int[np.ndarray, "n"] | None = None,
    ) -> dict[str, Any]:
        """The scores of an individual for the history, on all prompts or on some, given by their indices."""
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


def _told(record: dict[str, Any]) -> str:
    """A record without finite scores, in words: its factors, and the first bad layer."""
    bad, subject = record["not_finite"], f"individual {record['id']}, " if "id" in record else ""
    numbers = ", ".join(f"{name} {shown(array_of(record[name]))}" for name in ("factors", "gains") if name in record)
    return f"{subject}{numbers}: first {describe_layer(bad['first_layer'])}, at prompt {bad['prompt']}"


def _count(records: Sequence[dict[str, Any]]) -> str:
    bad = sum(record["fitness"] is None for record in records)
    return f"{bad} of {len(records)} have scores that are not finite"
