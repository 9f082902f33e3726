"""The history of a search: a line for each individual, in memory and in `history.jsonl`, and the budget of individuals.

A resumed run takes the summaries of its first individuals from the lines that are already there (`RunFolder.recorded`).

Letters: P population.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from lpes_jax.errors import UserError
from lpes_jax.report.progress import SearchProgress
from lpes_jax.search.evaluator import Evaluator, in_words, not_finite_of
from lpes_jax.search.individuals import Individuals
from lpes_jax.search.racing import Bar
from lpes_jax.search.stop import BudgetSpent, GracefulStop
from lpes_jax.store.run_folder import RunFolder


class History:
    """Adds generations, or single lines, to the history.

    Args:
        evaluator: Scores the individuals.
        folder: The run's folder.
        progress: Shows the generation and the best fitness so far.
        stop: Ends the search after a signal, when the lines so far are written.
        max_evaluations: The most individuals that are scored; None: no limit.
        score_dtype: The dtype of the scorer's products, for each line; None: the model's.

    Attributes:
        records: The lines of history.jsonl.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        folder: RunFolder,
        progress: SearchProgress,
        stop: GracefulStop,
        max_evaluations: int | None = None,
        score_dtype: str | None = None,
    ):
        self.evaluator, self.folder, self.progress, self.stop = evaluator, folder, progress, stop
        self.records: list[dict[str, Any]] = []
        self._max_evaluations = max_evaluations
        self._scored_in = {} if score_dtype is None else {"score_dtype": score_dtype}

    @property
    def best(self) -> dict[str, Any]:
        """The fittest individual (the first of equals). It was scored on all examples."""
        return max(self.records, key=lambda record: -np.inf if record["fitness"] is None else record["fitness"])

    def keep(self, count: int) -> None:
        """Start with the first `count` lines of the resumed run, and drop its other lines."""
        self.records = self.folder.keep(count)

    def add(self, record: dict[str, Any]) -> None:
        """Add a line that needs no scoring."""
        self.records.append(record)
        self.folder.append([record])

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
        """The fitness of a generation (NaN if a score is not finite). Adds a line for each individual.

        Args:
            number: The number of the generation.
            generations: The number of all generations.
            drafts: The lines without numbers and scores.
            individuals: The individuals.
            rivals: The ids of the rivals of a race's bar (`racing.Bar`).
            keep: The `keep` of a race's bar. Without rivals and `keep` there is no race.

        Raises:
            BudgetSpent: `max_evaluations` individuals are scored, and none beyond. In a race each counts as one.
            UserError: No score is finite, so the search cannot continue.
        """
        best = f"best {self.best['fitness']:.4f}" if self.records and self.best["fitness"] is not None else ""
        self.progress.note(f"generation {number}/{generations}  {best}")
        before, name = len(self.records), f"generation {number}"
        bar = self._bar(rivals, keep)
        # In a race a generation is one block: the size of blocks must not decide which individuals are dropped.
        block_size = len(drafts) if bar else self.evaluator.scorer.individuals_at_once
        for start in range(0, len(drafts), block_size):
            block = slice(start, start + block_size)
            self._block(drafts[block], individuals.select(block), bar)
            self.evaluator.check_model(name, self.records[before:])
        records = self.records[before:]
        self.evaluator.check_any(name, records)
        if bad := [record for record in records if record["fitness"] is None]:
            print(f"note: {name}: {not_finite_of(records)}; {in_words(bad[0])}", file=sys.stderr)
        return np.array([np.nan if record["fitness"] is None else record["fitness"] for record in records])

    def _bar(self, rivals: Sequence[int], keep: int) -> Bar | None:
        """The bar of a generation's race. None without a race, and if a rival has no finite scores on all examples."""
        race, values = self.evaluator.race, [self.records[rival].get("values") for rival in rivals]
        if race is None or not (rivals or keep) or None in values:
            return None
        try:
            return race.bar([text for text in values if text], keep)
        except ValueError as error:
            raise UserError(
                f"--resume: the values of an individual in {self.folder.history_path} are not those of a race; give another "
                "--output-path"
            ) from error

    def _block(self, drafts: list[dict[str, Any]], individuals: Individuals, bar: Bar | None) -> None:
        """Score individuals, or take their scores from the resumed run, and add their lines."""
        rows = [individuals.select(index) for index in range(len(drafts))]
        keys = [row.key for row in rows]
        cached = [self.evaluator.knows(key) or key in keys[:index] for index, key in enumerate(keys)]
        fits = self._within_budget(cached)
        drafts = [
            draft | row.record | self._scored_in | {"cached": known}
            for draft, row, known in zip(drafts[:fits], rows, cached, strict=False)
        ]
        parts = self.evaluator.objective.accuracy_keys
        recorded = self.folder.recorded[len(self.records) : len(self.records) + len(drafts)]
        for draft, record in zip(drafts, recorded, strict=False):
            self.folder.must_continue(draft, record)
            self.folder.must_continue({"id": record["id"], "parts": parts}, record | {"parts": list(record["accuracy"])})
        if len(recorded) == len(drafts):
            summaries = self.evaluator.replay(keys, recorded)
        else:  # an incomplete block is scored again as a whole: the last digit of likelihoods may depend on the block
            summaries = self.evaluator.summaries(individuals.select(slice(fits)), bar)
        records = recorded + [draft | summary for draft, summary in zip(drafts, summaries, strict=True)][len(recorded) :]
        self.folder.append(records[len(recorded) :])
        self.records += records
        self.stop.check()
        if fits < len(cached) or self.evaluator.evaluations == self._max_evaluations:
            raise BudgetSpent

    def _within_budget(self, cached: list[bool]) -> int:
        """The number of individuals, from the first, that the remaining evaluations suffice for."""
        if self._max_evaluations is None:
            return len(cached)
        needed = np.cumsum([not known for known in cached])
        return int((needed <= self._max_evaluations - self.evaluator.evaluations).sum())
