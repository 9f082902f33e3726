"""A task whose prompts have different lengths: `Ranged(KeyValue(20), "num_pairs", low=5)` has from 5 to 20 pairs.

Each example has its own length, drawn log-uniformly: as many examples have 5 to 10 pairs as 10 to 20. Example i of a split has
the same length for every count. It is the example of the longest task, truncated to its length, so the question stays the same.
"""

import math
import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from lpes_jax.errors import UserError
from lpes_jax.tasks import common_words, frequent_words, key_value, mdqa, needle, niah, variable_tracking
from lpes_jax.tasks.prompts import Prompt, Split, Task
from lpes_jax.tasks.prompts import slot as slot_of


@dataclass(frozen=True)
class Sized:
    """An example with its length."""

    length: int
    example: Any


@dataclass(frozen=True)
class Ranged:
    """`longest` with lengths from `low` up to its own; `setting` is the field with the length.

    Positions are in percent of each prompt's own items; `num_items` is that of the longest. Raises UserError for questions that
    share a haystack, because these have one length.
    """

    longest: Task[Any]
    setting: str
    low: int

    name: ClassVar[str]

    def __post_init__(self):
        object.__setattr__(self, "name", self.longest.name)
        if getattr(self.longest, "queries_per_haystack", 1) > 1:
            flag = f"--{self.setting.replace('_', '-')} {self.low}:{self.high}"
            raise UserError(f"{flag}: questions about one haystack have one length; remove --queries-per-haystack")
        self.of(self.low)  # the task refuses impossible lengths

    @property
    def high(self) -> int:
        return getattr(self.longest, self.setting)

    def of(self, length: int) -> Any:
        """The task of one length."""
        return replace(self.longest, **{self.setting: length})  # pyright: ignore[reportArgumentType]: tasks are dataclasses

    @property
    def num_items(self) -> int:
        return self.longest.num_items

    @property
    def plain(self) -> "Ranged | None":
        return None if self.longest.plain is None else Ranged(self.longest.plain, self.setting, self.low)

    @property
    def decided_by(self) -> Literal["generation", "options"]:
        return self.longest.decided_by

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.longest.metrics

    @property
    def max_new_tokens(self) -> int:
        return self.longest.max_new_tokens

    @property
    def max_prompt_tokens(self) -> int | None:
        return self.longest.max_prompt_tokens

    @property
    def stop(self) -> tuple[str, ...]:
        return self.longest.stop

    def examples(self, split: Split, count: int | None, seed: int) -> list[Sized]:
        """The examples of the longest task, each truncated to the length that `seed` draws for it."""
        found = self.longest.examples(split, count, seed)
        lengths = [
            drawn_length(self.low, self.high, f"lpes length {self.name} {seed} {split} {index}") for index in range(len(found))
        ]
        return [Sized(length, shortened(example, length)) for length, example in zip(lengths, found, strict=True)]

    def prompt(self, example: Sized, slot: int, position: int | None = None) -> Prompt:
        """The example with its fact at `position`; without one, at the percentage of `slot` in the longest prompt."""
        task = self.of(example.length)
        percent = round(100 * slot / max(self.num_items - 1, 1)) if position is None else position
        return task.prompt(example.example, slot_of(percent, task.num_items), percent)

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        return self.longest.score(output, prompt)


def drawn_length(low: int, high: int, seed: str) -> int:
    """A whole number from `low` to `high`: exp of a uniform number from log(low) to log(high + 1), rounded down."""
    share = random.Random(seed).getrandbits(53) / 2**53
    return min(high, int(math.exp(math.log(low) + share * (math.log(high + 1) - math.log(low)))))


def shortened(example: Any, length: int) -> Any:
    """A task's example with only its first `length` pairs, documents or sentences; the question stays the same."""
    match example:
        case key_value.Example():
            return replace(example, others=example.others[: length - 1])
        case mdqa.Example():
            return replace(example, distractors=example.distractors[: length - 1])
        case needle.Example():
            other_slots = tuple(slot * (length + 1) // (len(example.filler) + 1) for slot in example.other_slots)
            return replace(example, filler=example.filler[:length], other_slots=other_slots)
        case niah.Example():
            other_slots = tuple(slot * (length + 1) // (len(example.lines) + 1) for slot in example.other_slots)
            return replace(example, lines=example.lines[:length], other_slots=other_slots)
        case variable_tracking.Example():
            return example.with_length(length)
        case common_words.Example():
            return replace(example, words=example.words[:length])
        case frequent_words.Example():
            return example  # the task's text length decides how often its words occur
        case _:
            raise TypeError(f"{type(example).__name__} has no length")
