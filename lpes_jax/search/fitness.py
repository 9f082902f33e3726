"""The fitness of individuals on the search examples, and the history of a run.

What a fitness is stands in objective.py. Individuals with the same factors and gains are scored once; in a race (racing.py),
hopeless ones on a part of the examples.

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

# What the model says of an individual; the last three where they apply. `raced` is the share of the examples that it was scored
# on before a race dropped it, with which its accuracies are of these and its fitness is an estimate; `values` are what a race
# compares others with.
SCORES = ("fitness", "accuracy", "log_likelihood", "not_finite", "raced", "values")


# (prompt, individual or None for the model as it is, granularities) -> layer
Trace = Callable[[int, Individuals | None, tuple[Granularity, Granularity]], int | str | None]


class Fitness:
    """Scores generations and keeps the history: `records` are the lines of history.jsonl.

    `first_bad_layer` says where a score became NaN or infinite (`lpes_jax.finite`); `granularities` are of factors and gains;
    `max_evaluations` (None: no bound) are the individuals that may be scored; `race`: None to score all on everything.
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
    ):
        self.scorer, self.objective, self.race = scorer, objective, race
        self.folder, self.progress, self.stop = folder, progress, stop
        self.first_bad_layer, self.granularities, self.max_evaluations = first_bad_layer, granularities, max_evaluations
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
        bar = self._bar(rivals, keep)
        at_once = len(drafts) if bar else self.scorer.individuals_at_once  # who is dropped must not depend on blocks
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
        keys = [individuals.at(number).key for number in range(len(individuals.factors))]
        unseen: dict[tuple, int] = {}
        for number, key in enumerate(keys):
            if key not in self._seen:
                unseen.setdefault(key, number)
        self.progress.skip((len(keys) - len(unseen)) * self.scorer.num_prompts)
        if unseen:
            rows = individuals.at(list(unseen.values()))
            found = self._scored_on_all(rows, granularities) if bar is None else self._raced(rows, bar)
            self.evaluations += len(unseen)
            self._seen |= zip(unseen, found, strict=True)
        return [self._seen[key] for key in keys]

    def _scored_on_all(self, rows: Individuals, granularities: tuple[Granularity, Granularity]) -> list[dict[str, Any]]:
        """The summaries of individuals on all examples."""
        scores = self._scores(self.scorer, rows, granularities)
        return [self._summary(rows.at(row), granularities, *of_row) for row, of_row in enumerate(zip(*scores, strict=True))]

    def _raced(self, rows: Individuals, bar: Bar) -> list[dict[str, Any]]:
        """The summaries of a generation's new individuals after their race."""
        race, found = self.race, []
        assert race is not None

        def score(stage: int, chosen: Int[np.ndarray, "n"]) -> Scores:
            return self._scores(partial(race.scorer, stages=[stage]), rows.at(chosen), self.granularities)

        for row, result in enumerate(race.run(score, len(rows.factors), bar)):
            summary = self._summary(rows.at(row), self.granularities, result.correct, result.log_likelihood, result.prompts)
            found.append(summary if result.estimate is None else summary | {"fitness": round(result.estimate, 9)})
            self._save(self.scorer.num_prompts - len(result.correct))
        return found

    def _scores(
        self, score: Callable[..., Scores], rows: Individuals, granularities: tuple[Granularity, Granularity]
    ) -> Scores:
        """What the model says of individuals."""
        factors_granularity, gains_granularity = granularities
        gains = {} if rows.gains is None else {"gains": rows.gains, "gains_granularity": gains_granularity}
        return score(rows.factors, factors_granularity, on_prompts=self.progress.prompts, **gains)

    def _bar(self, rivals: Sequence[int], keep: int) -> Bar | None:
        """What a generation races to. None without a race, and where a rival has no finite scores on everything."""
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
        rows = [individuals.at(number) for number in range(len(drafts))]
        keys = [row.key for row in rows]
        cached = [key in self._seen or key in keys[:i] for i, key in enumerate(keys)]
        fits = self._within_budget(cached)
        drafts = [
            draft | row.record | {"cached": known} for draft, row, known in zip(drafts[:fits], rows, cached, strict=False)
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
        else:  # a block that was cut is scored again as a whole: likelihoods may depend in a digit on who is scored together
            summaries = self._summaries(individuals.at(slice(fits)), self.granularities, bar)
        records = recorded + [draft | summary for draft, summary in zip(drafts, summaries, strict=True)][len(recorded) :]
        self.folder.append(records[len(recorded) :])
        self.records += records
        self.stop.check()
        if fits < len(cached) or self.evaluations == self.max_evaluations:
            raise BudgetSpent

    def _within_budget(self, cached: list[bool]) -> int:
        """How many individuals, from the first, need no more evaluations than are left."""
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
        """What the history says of scores, of all prompts or of some by their numbers."""
        summary = self.objective.summary(correct, log_likelihood, prompts)
        finite = summary["fitness"] is not None
        if not finite:  # the first prompt with such a score, and the layer in which it arises
            first = int(np.flatnonzero(~np.isfinite(log_likelihood))[0])
            first = first if prompts is None else int(prompts[first])
            summary["not_finite"] = {"prompt": first, "first_layer": self.first_bad_layer(first, individual, granularities)}
        if prompts is not None:
            summary["raced"] = len(prompts) / self.scorer.num_prompts
        elif self.race is not None and finite:
            summary["values"] = racing.to_text(self.race.values(correct[None], log_likelihood[None])[0])
        return summary


def _told(record: dict[str, Any]) -> str:
    """A record without finite scores in words: its factors, and where it goes wrong."""
    where, who = record["not_finite"], f"individual {record['id']}, " if "id" in record else ""
    numbers = ", ".join(f"{name} {shown(array_of(record[name]))}" for name in ("factors", "gains") if name in record)
    return f"{who}{numbers}: first {describe_layer(where['first_layer'])}, at prompt {where['prompt']}"


def _count(records: Sequence[dict[str, Any]]) -> str:
    bad = sum(record["fitness"] is None for record in records)
    return f"{bad} of {len(records)} have scores that are not finite"
