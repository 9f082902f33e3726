"""Tasks x lengths x positions of the fact, measured in blocks until a budget of time is spent or everything is decided.

    grid = Grid(loaded, tasks, plan, candidates)
    grid.ceilings(until)                    # the fact alone
    while (column := grid.next()) and time is left for grid.seconds(column):
        grid.add(column)                    # a block of questions more

A column is a task at a length: prompts that have as many tokens, answers included. It is asked in units: a haystack with a few
questions at each position (kv, multikey_2, multikey_3), or one example at each position. All prompts of a unit begin alike as
far as they can, and what they share is computed once (prefixes.py). The value of a unit at a position is the share of its
questions there whose gold answer is the greedy continuation: units are independent of each other, the questions of one are not.

A cell is a column's position. Its bounds are a confidence sequence over units (statistics.py), which stays valid however often
one looks. All bounds hold together with the confidence asked for: a tenth of what may go wrong is for the ceilings, the rest
for the cells of the tasks that can be judged by these, each in equal parts (Bonferroni). A column is `above` when the lower
bound of every position is above the threshold's share of the upper bound of the ceiling, `below` when the upper bound of some
position is below its share of the ceiling's lower bound, and undecided otherwise.

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
from lpes_jax.tasks.sizes import alone, of_length
from lpes_jax.tasks.variable_tracking import VariableTracking

Status = Literal["above", "below", "undecided"]
QUESTIONS = 4  # of a haystack at a position, where all items can be asked for
UNITS = 8  # of a block
MOST_UNITS = 480
CEILING_QUESTIONS, MOST_CEILING = 20, 200  # of a task with the fact alone: of a block, and in all
_SURE_BLOCKS = 4  # of questions with the fact alone
_FOR_CEILINGS = 0.1  # of what may go wrong
_GROWTH = 1.3  # seconds of a block are taken to grow as tokens to this power, where a length was not measured yet


def make_task(name: ProfileTask, key_length: int | None = None) -> Any:
    """A task of the grid, of any length."""
    if name == "kv":
        return KeyValue(QUESTIONS, key_length, queries_per_haystack=QUESTIONS)
    if name == "vt":
        return VariableTracking(placing="together", answer_opener="")
    return Niah(name, queries_per_haystack=QUESTIONS if name.startswith("multikey") else 1)


@dataclass(frozen=True)
class Plan:
    """What is measured, and what counts as found: a threshold as a share of the ceiling, and a confidence."""

    tasks: tuple[ProfileTask, ...]
    lengths: tuple[int, ...]
    positions: tuple[int, ...]
    threshold: float
    confidence: float
    seed: int
    key_length: int | None = None


@dataclass
class Column:
    """A task at a length. `missing` says why nothing was measured."""

    name: ProfileTask
    length: int
    task: Any = None
    missing: str | None = None
    blocks: int = 0
    seconds: list[float] = field(default_factory=list)  # of each block, without compiling
    compiling: float = 0.0
    tokens: int = 0  # of all prompts, and the share of them that sharing saved
    saved: float = 0.0
    values: Float[np.ndarray, "U C S"] = field(default_factory=lambda: np.zeros((0, 0, 0)))
    low: Float[np.ndarray, "C S"] = field(default_factory=lambda: np.zeros((0, 0)))
    high: Float[np.ndarray, "C S"] = field(default_factory=lambda: np.ones((0, 0)))

    @property
    def questions_of_a_unit(self) -> int:
        return getattr(self.task, "queries_per_haystack", 1)


class Grid:
    """The columns of a plan for each candidate (the model as it is first), and their ceilings, that of the model as it is."""

    def __init__(
        self,
        loaded: Loaded,
        plan: Plan,
        candidates: Sequence[Candidate],
        *,
        batch_size: int | None = None,
    ):
        self.loaded, self.plan, self.candidates, self._batch_size = loaded, plan, candidates, batch_size
        self.on_prompts: Callable[[int], None] = lambda count: None  # is told of (candidate, prompt) pairs that are done
        self._window = loaded.model.config.max_position_embeddings
        self.columns = {(name, length): Column(name, length) for name in plan.tasks for length in plan.lengths}
        self.ceiling: dict[str, tuple[float, float, float]] = {}
        for column in self.columns.values():
            try:
                task = make_task(column.name, plan.key_length)
                column.task = of_length(task, min(column.length, self._window), loaded.tokenizer)
            except UserError as error:
                column.missing = str(error).partition("; ")[2]

    def prompts_of_block(self, column: Column) -> int:
        """(candidate, prompt) pairs of a block of questions."""
        return UNITS * column.questions_of_a_unit * len(self.plan.positions) * len(self.candidates)

    def prompts_of_first_blocks(self) -> int:
        """Of a block for each column, and of the ceilings."""
        return CEILING_QUESTIONS * len(self.plan.tasks) + sum(map(self.prompts_of_block, self.columns.values()))

    def ceilings(self, until: float) -> None:
        """How often each task is answered where the fact stands alone: mean and bounds, for the model as it is.

        A block of questions for all tasks, a few more for those that can be judged, and yet more up to a time (of `time.time`).
        """
        correct: dict[str, list[float]] = {name: [] for name in self.plan.tasks}
        for block in range(MOST_CEILING // CEILING_QUESTIONS):
            names: list[ProfileTask] = [name for name in self.plan.tasks if not block or self.usable(name)]
            if not names or (block >= _SURE_BLOCKS and time.time() > until):
                return
            prompts: list[Prompt] = []
            for name in names:
                task = alone(make_task(name, self.plan.key_length))
                examples = task.examples("test", CEILING_QUESTIONS, self.plan.seed * 1000 + block)
                prompts += [task.prompt(example, 0) for example in examples]
            found = self._scored(prompts, self.candidates[:1])[0][0].reshape(len(names), -1)
            for name, of_task in zip(names, found, strict=True):
                correct[name] += of_task.tolist()
                values = np.array(correct[name])
                alpha = _FOR_CEILINGS * (1 - self.plan.confidence) / len(self.plan.tasks)
                bounds, (_, low, high) = confidence_sequence(values, alpha), self.ceiling.get(name, (0.0, 0.0, 1.0))
                self.ceiling[name] = float(values.mean()), max(low, bounds[0]), min(high, bounds[1])

    @property
    def alpha(self) -> float:
        """What may go wrong with the bounds of one cell."""
        cells = sum(it.task is not None and self.usable(it.name) for it in self.columns.values())
        cells *= len(self.candidates) * len(self.plan.positions)
        return (1 - _FOR_CEILINGS) * (1 - self.plan.confidence) / max(1, cells)

    def usable(self, name: str) -> bool:
        """Whether the task is answered often enough with the fact alone that something can be said of positions."""
        return self.ceiling[name][0] >= 0.5

    def next(self, skipped: Container[int] = ()) -> Column | None:
        """The column that the next block is for, of those whose `id` is not in `skipped`; None where all are decided.

        First each column once, the shortest first, but none beyond a length where facts are lost; then those that decide an
        effective length, the first undecided one of each task; then columns beyond, once; then the others that are undecided.
        """
        columns = [it for it in self.columns.values() if it.missing is None and self.usable(it.name) and id(it) not in skipped]
        new = [it for it in columns if not it.blocks]
        open_ = [it for it in columns if it.blocks and self.undecided(it) and len(it.values) < MOST_UNITS]
        groups = (
            [it for it in new if not self._is_beyond(it)],
            [it for it in open_ if self._decides(it)],
            new,
            open_,
        )
        return min(next(filter(None, groups), []), key=lambda it: (len(it.values), it.length), default=None)

    def seconds(self, column: Column) -> float:
        """What the next block of a column will take, about: as the last one, or as one of a shorter length and compiling."""
        if column.seconds:
            return column.seconds[-1]
        measured = [it for it in self.columns.values() if it.seconds]
        known = [it for it in measured if it.name == column.name] or measured
        nearest = max(known, key=lambda it: it.length, default=None)
        if nearest is None:
            return 0.0
        return nearest.seconds[-1] * (column.length / nearest.length) ** _GROWTH + max(it.compiling for it in measured)

    def seconds_of_text(self, tokens: int) -> float:
        """What so many tokens of plain text will take, about, with all candidates, and compiling."""
        measured = [it for it in self.columns.values() if it.seconds]
        if not measured:
            return 0.0
        read = sum(it.tokens * (1 - it.saved) for it in measured) / sum(sum(it.seconds) for it in measured)
        return tokens / read + max(it.compiling for it in measured) * len(self.candidates)

    def add(self, column: Column) -> None:
        """Ask a block of questions more, of all candidates."""
        started, task, asked = time.time(), column.task, column.questions_of_a_unit
        examples = task.examples("test", UNITS * asked, self.plan.seed * 1000 + column.blocks)
        places = [task_prompts.slot(position, task.num_items) for position in self.plan.positions]
        prompts = [
            task.prompt(example, slot, position)
            for example in examples
            for slot, position in zip(places, self.plan.positions, strict=True)
        ]
        correct, tokens, saved = self._scored(prompts, self.candidates)
        shape = (len(self.candidates), UNITS, asked, len(places))
        values = correct.reshape(shape).mean(axis=2).transpose(1, 0, 2)
        first = not column.blocks
        column.values = values if first else np.concatenate([column.values, values])
        bounds = np.array([[confidence_sequence(cell, self.alpha) for cell in of] for of in column.values.transpose(1, 2, 0)])
        low, high = bounds[..., 0], bounds[..., 1]
        if not first:  # they hold at every look, so they hold together
            low, high = np.maximum(column.low, low), np.minimum(column.high, high)
        column.low, column.high, column.saved = low, high, saved
        column.blocks += 1
        column.tokens += tokens
        compiling = compilations(since=started)["seconds"]
        column.compiling += compiling
        column.seconds.append(time.time() - started - compiling)

    def status(self, column: Column, candidate: int) -> Status:
        """Whether every position of a column is above the threshold, or some below."""
        if not column.blocks:
            return "undecided"
        _, low, high = self.ceiling[column.name]
        if (column.low[candidate] >= self.plan.threshold * high).all():
            return "above"
        return "below" if (column.high[candidate] < self.plan.threshold * low).any() else "undecided"

    def undecided(self, column: Column) -> bool:
        return any(self.status(column, candidate) == "undecided" for candidate in range(len(self.candidates)))

    def _decides(self, column: Column) -> bool:
        """Whether a candidate's effective length hangs on it: all shorter ones are above."""
        return any(
            self.status(column, candidate) == "undecided"
            and all(self.status(it, candidate) == "above" for it in self._shorter(column))
            for candidate in range(len(self.candidates))
        )

    def _is_beyond(self, column: Column) -> bool:
        """Whether every candidate loses facts at a shorter length already."""
        shorter = self._shorter(column)
        return all(any(self.status(it, number) == "below" for it in shorter) for number in range(len(self.candidates)))

    def _shorter(self, column: Column) -> list[Column]:
        shorter = (self.columns[column.name, length] for length in self.plan.lengths if length < column.length)
        return [it for it in shorter if it.task is not None]

    def _scored(self, prompts: Sequence[Prompt], candidates: Sequence[Candidate]) -> tuple[np.ndarray, int, float]:
        """Is the gold answer the greedy continuation, of each candidate and prompt; the tokens of all; what sharing saved."""
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        encoded = task_prompts.encode(prompts, tokenizer, self._window)
        scorer = Scorer(model, encoded, batch_size=self._batch_size, individuals=UNITS * len(candidates))
        factors, gains = arrays(candidates, model.config.num_layers)
        scores = scorer(factors[0], factors[1], self.on_prompts, gains=gains[0], gains_granularity=gains[1])
        for number, candidate in enumerate(candidates):
            if len(bad := np.flatnonzero(~np.isfinite(scores.log_likelihood[number]))):
                raise not_finite(model, scorer.sequences(int(bad[0])), candidate.factors, name=candidate.name)
        return np.asarray(scores.correct, float), sum(len(it.ids) for it in encoded), scorer.tokens_saved


def arrays(
    candidates: Sequence[Candidate], num_layers: int
) -> tuple[tuple[np.ndarray, Granularity], tuple[np.ndarray | None, Granularity]]:
    """The factors of all candidates, and their gains or None, each with its granularity; 1 where a candidate has none."""
    used = next((it.factors for it in candidates if it.factors is not None), LayerFactors.uniform(1.0, num_layers))
    ones = np.ones_like(used.factors)
    factors = np.stack([ones if it.factors is None else it.factors.factors for it in candidates])
    if used.gains is None:
        return (factors, used.granularity), (None, "layer")
    gains = [it.factors.gains if it.factors is not None and it.factors.gains is not None else None for it in candidates]
    stacked = np.stack([np.ones_like(used.gains) if it is None else it for it in gains])
    return (factors, used.granularity), (stacked, used.gains_granularity or "layer")
