"""Tasks x lengths x positions of the fact, measured in blocks until the time is spent or everything is decided.

    grid = Grid(loaded, tasks, plan, candidates)
    grid.ceilings(until)                    # without a haystack
    while (column := grid.next()) and time is left for grid.seconds(column):
        grid.add(column)                    # one more block of questions

A column is a task at a length: prompts with that many tokens, including answers. It is measured in units: a haystack with a few
questions at each position (kv, multikey_2, multikey_3), or one example at each position. All prompts of a unit share as long a
prefix as possible, which is computed once (prefixes.py). The value of a unit at a position is the share of its questions there
whose gold answer, in one of its forms, is the greedy continuation. Units are independent of each other; the questions of a unit
are not.

A cell is a position of a column. Its bounds are a confidence sequence over units (statistics.py), which is valid at every
sample size. All bounds hold together with the required confidence: the ceilings have a tenth of the error probability, and the
cells of tasks that can be judged share the rest equally (Bonferroni). A column is `above` if the lower bound of
every position is above the threshold's share of the ceiling's upper bound, `below` if the upper bound of some position is below
the threshold's share of the ceiling's lower bound, and undecided otherwise.

Letters: U units, C candidates, S positions.
"""

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from lpes_jax.choices import ProfileTask
from lpes_jax.compilation import compilations
from lpes_jax.errors import UserError
from lpes_jax.evaluation import Candidate
from lpes_jax.factors import LayerFactors
from lpes_jax.finite import not_finite
from lpes_jax.models.llama import Loaded
from lpes_jax.rope import Granularity
from lpes_jax.scoring import Scorer
from lpes_jax.statistics import confidence_sequence
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.niah import Niah
from lpes_jax.tasks.prompts import Prompt
from lpes_jax.tasks.sizes import with_length, without_haystack
from lpes_jax.tasks.variable_tracking import VariableTracking

Status = Literal["above", "below", "undecided"]
QUESTIONS = 4  # per haystack and position, if all items can be asked for
UNITS = 8  # per block
MOST_UNITS = 480
CEILING_QUESTIONS, MOST_CEILING = 20, 200  # of a task without a haystack: per block, and in total
_SURE_BLOCKS = 4  # of questions without a haystack
_FOR_CEILINGS = 0.1  # share of the error probability
_GROWTH = 1.3  # seconds of a block are assumed to grow as tokens to this power, for lengths that are not measured yet


def make_task(name: ProfileTask, key_length: int | None = None) -> Any:
    """A task of the grid, of any length."""
    if name == "kv":
        return KeyValue(QUESTIONS + 1, key_length, queries_per_haystack=QUESTIONS)
    if name == "vt":
        return VariableTracking(placing="together", answer_opener="")
    return Niah(name, queries_per_haystack=QUESTIONS if name.startswith("multikey") else 1)


@dataclass(frozen=True)
class ProfilePlan:
    """What is measured, and what counts as found: the threshold as a share of the ceiling, and the confidence."""

    tasks: tuple[ProfileTask, ...]
    lengths: tuple[int, ...]
    positions: tuple[int, ...]
    threshold: float
    confidence: float
    seed: int
    key_length: int | None = None


@dataclass
class Column:
    """A task at a length. `missing` is the reason if nothing is measured."""

    name: ProfileTask
    length: int
    task: Any = None
    missing: str | None = None
    blocks: int = 0
    seconds: list[float] = field(default_factory=list)  # of each block, without compiling
    compiling: float = 0.0
    tokens: int = 0  # of all prompts
    saved: float = 0.0  # share of the tokens that shared prefixes saved
    values: Float[np.ndarray, "U C S"] = field(default_factory=lambda: np.zeros((0, 0, 0)))
    low: Float[np.ndarray, "C S"] = field(default_factory=lambda: np.zeros((0, 0)))
    high: Float[np.ndarray, "C S"] = field(default_factory=lambda: np.ones((0, 0)))

    @property
    def questions_of_a_unit(self) -> int:
        return getattr(self.task, "queries_per_haystack", 1)


class Grid:
    """The columns of a plan for each candidate (the plain model first), and the tasks' ceilings, which the plain model has."""

    def __init__(
        self,
        loaded: Loaded,
        plan: ProfilePlan,
        candidates: Sequence[Candidate],
        *,
        batch_size: int | None = None,
    ):
        self.loaded, self.plan, self.candidates, self._batch_size = loaded, plan, candidates, batch_size
        self.on_prompts: Callable[[int], None] = lambda count: None  # gets the number of finished (candidate, prompt) pairs
        self._window = loaded.model.config.max_position_embeddings
        self.columns = {(name, length): Column(name, length) for name in plan.tasks for length in plan.lengths}
        self.ceiling: dict[str, tuple[float, float, float]] = {}
        for column in self.columns.values():
            try:
                task = make_task(column.name, plan.key_length)
                column.task = with_length(task, min(column.length, self._window), loaded.tokenizer)
            except UserError as error:
                column.missing = str(error).partition("; ")[2]

    def prompts_of_block(self, column: Column) -> int:
        """The number of (candidate, prompt) pairs in a block of questions."""
        return UNITS * column.questions_of_a_unit * len(self.plan.positions) * len(self.candidates)

    def prompts_of_first_blocks(self) -> int:
        """The number of these pairs in one block of every column, and in the ceilings."""
        return CEILING_QUESTIONS * len(self.plan.tasks) + sum(map(self.prompts_of_block, self.columns.values()))

    def ceilings(self, until: float) -> None:
        """Measure how often the plain model answers each task without a haystack: mean and bounds.

        All tasks get one block of questions. Those that can be judged get a few more, and further ones until the time `until`
        (as in `time.time`).
        """
        correct: dict[str, list[float]] = {name: [] for name in self.plan.tasks}
        for block in range(MOST_CEILING // CEILING_QUESTIONS):
            names: list[ProfileTask] = [name for name in self.plan.tasks if not block or self.usable(name)]
            if not names or (block >= _SURE_BLOCKS and time.time() > until):
                return
            prompts: list[Prompt] = []
            for name in names:
                task = without_haystack(make_task(name, self.plan.key_length))
                examples = task.examples("test", CEILING_QUESTIONS, self.plan.seed * 1000 + block)
                prompts += [task.prompt(example, 0) for example in examples]
            found = self._scored(prompts, self.candidates[:1])[0][0].reshape(len(names), -1)
            for name, task_values in zip(names, found, strict=True):
                correct[name] += task_values.tolist()
                values = np.array(correct[name])
                alpha = _FOR_CEILINGS * (1 - self.plan.confidence) / len(self.plan.tasks)
                bounds, (_, low, high) = confidence_sequence(values, alpha), self.ceiling.get(name, (0.0, 0.0, 1.0))
                self.ceiling[name] = float(values.mean()), max(low, bounds[0]), min(high, bounds[1])

    @property
    def alpha(self) -> float:
        """The error probability of the bounds of one cell."""
        cells = sum(column.task is not None and self.usable(column.name) for column in self.columns.values())
        cells *= len(self.candidates) * len(self.plan.positions)
        return (1 - _FOR_CEILINGS) * (1 - self.plan.confidence) / max(1, cells)

    def usable(self, name: str) -> bool:
        """Whether the task is answered often enough without a haystack that positions can be judged."""
        return self.ceiling[name][0] >= 0.5

    def next(self, skipped: Container[int] = ()) -> Column | None:
        """The column of the next block, without those whose `id` is in `skipped`; None if all are decided.

        First each column gets one block, the shortest first, up to the length at which facts are lost. Then come the columns
        that decide an effective length (the first undecided one of each task), then one block for each longer column, then the
        other undecided columns.
        """
        columns = [
            column
            for column in self.columns.values()
            if column.missing is None and self.usable(column.name) and id(column) not in skipped
        ]
        new = [column for column in columns if not column.blocks]
        undecided = [
            column for column in columns if column.blocks and self.undecided(column) and len(column.values) < MOST_UNITS
        ]
        groups = (
            [column for column in new if not self._is_beyond(column)],
            [column for column in undecided if self._decides(column)],
            new,
            undecided,
        )
        return min(next(filter(None, groups), []), key=lambda column: (len(column.values), column.length), default=None)

    def seconds(self, column: Column) -> float:
        """The estimated seconds of a column's next block: those of the last one, or of a shorter length plus compilation."""
        if column.seconds:
            return column.seconds[-1]
        measured = [other for other in self.columns.values() if other.seconds]
        known = [other for other in measured if other.name == column.name] or measured
        nearest = max(known, key=lambda other: other.length, default=None)
        if nearest is None:
            return 0.0
        growth = (column.length / nearest.length) ** _GROWTH
        return nearest.seconds[-1] * growth + max(other.compiling for other in measured)

    def seconds_of_text(self, tokens: int) -> float:
        """The estimated seconds for `tokens` tokens of plain text, with all candidates, including compilation."""
        measured = [column for column in self.columns.values() if column.seconds]
        if not measured:
            return 0.0
        read = sum(column.tokens * (1 - column.saved) for column in measured)
        per_second = read / sum(sum(column.seconds) for column in measured)
        return tokens / per_second + max(column.compiling for column in measured) * len(self.candidates)

    def add(self, column: Column) -> None:
        """Measure one more block of questions of a column, for all candidates."""
        started, task, asked = time.time(), column.task, column.questions_of_a_unit
        examples = task.examples("test", UNITS * asked, self.plan.seed * 1000 + column.blocks)
        slots = [task_prompts.slot(position, task.num_items) for position in self.plan.positions]
        prompts = [
            task.prompt(example, slot, position)
            for example in examples
            for slot, position in zip(slots, self.plan.positions, strict=True)
        ]
        correct, tokens, saved = self._scored(prompts, self.candidates)
        shape = (len(self.candidates), UNITS, asked, len(slots))
        values = correct.reshape(shape).mean(axis=2).transpose(1, 0, 2)
        first = not column.blocks
        column.values = values if first else np.concatenate([column.values, values])
        cells = column.values.transpose(1, 2, 0)
        bounds = np.array([[confidence_sequence(cell, self.alpha) for cell in row] for row in cells])
        low, high = bounds[..., 0], bounds[..., 1]
        if not first:  # the bounds hold at every sample size, so they hold together
            low, high = np.maximum(column.low, low), np.minimum(column.high, high)
        column.low, column.high, column.saved = low, high, saved
        column.blocks += 1
        column.tokens += tokens
        compiling = compilations(since=started)["seconds"]
        column.compiling += compiling
        column.seconds.append(time.time() - started - compiling)

    def status(self, column: Column, candidate: int) -> Status:
        """Whether every position of a column is above the threshold, or some position below."""
        if not column.blocks:
            return "undecided"
        _, low, high = self.ceiling[column.name]
        if (column.low[candidate] >= self.plan.threshold * high).all():
            return "above"
        return "below" if (column.high[candidate] < self.plan.threshold * low).any() else "undecided"

    def undecided(self, column: Column) -> bool:
        """Whether a column is undecided for some candidate."""
        return any(self.status(column, candidate) == "undecided" for candidate in range(len(self.candidates)))

    def _decides(self, column: Column) -> bool:
        """Whether a candidate's effective length depends on the column, because all shorter ones are above."""
        return any(
            self.status(column, candidate) == "undecided"
            and all(self.status(shorter, candidate) == "above" for shorter in self._shorter(column))
            for candidate in range(len(self.candidates))
        )

    def _is_beyond(self, column: Column) -> bool:
        """Whether every candidate loses facts at a shorter length."""
        shorter = self._shorter(column)
        return all(any(self.status(other, number) == "below" for other in shorter) for number in range(len(self.candidates)))

    def _shorter(self, column: Column) -> list[Column]:
        shorter = (self.columns[column.name, length] for length in self.plan.lengths if length < column.length)
        return [other for other in shorter if other.task is not None]

    def _scored(self, prompts: Sequence[Prompt], candidates: Sequence[Candidate]) -> tuple[np.ndarray, int, float]:
        """Whether the gold answer is the greedy continuation, per candidate and prompt; the total tokens; the share saved."""
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        encoded = task_prompts.encode(prompts, tokenizer, self._window)
        scorer = Scorer(model, encoded, batch_size=self._batch_size, individuals=UNITS * len(candidates))
        factors, gains = arrays(candidates, model.config.num_layers)
        scores = scorer(factors[0], factors[1], self.on_prompts, gains=gains[0], gains_granularity=gains[1])
        for number, candidate in enumerate(candidates):
            if len(bad := np.flatnonzero(~np.isfinite(scores.log_likelihood[number]))):
                raise not_finite(model, scorer.sequences(int(bad[0])), candidate.factors, name=candidate.name)
        return np.asarray(scores.correct, float), sum(len(prompt.ids) for prompt in encoded), scorer.tokens_saved


def arrays(
    candidates: Sequence[Candidate], num_layers: int
) -> tuple[tuple[np.ndarray, Granularity], tuple[np.ndarray | None, Granularity]]:
    """The factors of all candidates, and their gains or None, each with its granularity; 1 for candidates without."""
    found = [candidate.factors for candidate in candidates]
    used = next((factors for factors in found if factors is not None), LayerFactors.uniform(1.0, num_layers))
    ones = np.ones_like(used.factors)
    stacked = np.stack([ones if factors is None else factors.factors for factors in found])
    if used.gains is None:
        return (stacked, used.granularity), (None, "layer")
    gains = [None if factors is None else factors.gains for factors in found]
    stacked_gains = np.stack([np.ones_like(used.gains) if values is None else values for values in gains])
    return (stacked, used.granularity), (stacked_gains, used.gains_granularity or "layer")
