"""RULER's common words (Hsieh et al., 2024): which ten words are the most frequent in a numbered list?

    Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most
    often.
    1. harbour 2. lend 3. brave ...
    Question: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often in the list
    are:

A solved example of the same kind, with other words, comes first. Template, answer prefix, numbers and score equal those of
NVIDIA/RULER (Apache-2.0), `scripts/data/synthetic/common_words_extraction.py`, byte for byte; the code is our own. Words come
from our own list (`words.py`), or from a file of one word per line (`data`); RULER uses the package wonderwords.

Each of the ten common words occurs 30 times, all others three times. With `short_lists`, which RULER uses for prompts below
4,096 tokens, they occur six times and once. With `placing="spread"`, as in RULER, all words are in a random order, and there
are no positions. With `together`, the common words form one block at the slot, in a random order within the block, which
controls their depth.

A hash of the first common word assigns an example to `search` (40 %) or `test` (60 %).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from lpes_jax.choices import Placing
from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.tasks.data import content_id, generated_count, need_file, split_of
from lpes_jax.tasks.needle import one_of
from lpes_jax.tasks.prompts import Prompt, Split
from lpes_jax.tasks.prompts import position as position_of
from lpes_jax.tasks.recall import Recall
from lpes_jax.tasks.words import ADJECTIVES, NOUNS, VERBS
from lpes_jax.text_files import UNREADABLE, read_text

QUESTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most "
    "often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear "
    "most often in the list are:"
)
COMMON = 10
OWN_WORDS = ADJECTIVES + NOUNS + VERBS


@dataclass(frozen=True)
class Example:
    """The words of the list, the common ones first; the words of the solved example; and the seeds of their orders."""

    words: tuple[str, ...]
    shot: tuple[str, ...]
    order: int
    shot_order: int

    @property
    def id(self) -> str:
        return content_id(self.words, self.shot, self.order, self.shot_order)


@dataclass(frozen=True)
class CommonWords(Recall):
    """The task `cwe`.

    Attributes:
        num_words: Different words of a list, including the ten common ones.
        short_lists: See above.
        placing: See above.
        data: A text file of one word per line; None means our own words.

    Raises:
        UserError: Invalid settings. From `examples`: the file cannot be read or has too few words.
    """

    num_words: int = 50
    short_lists: bool = False
    placing: Placing = "spread"
    data: Path | None = None

    name: ClassVar[str] = "cwe"

    def __post_init__(self):
        check_bounds(self)
        if self.num_words < COMMON:
            raise UserError(f"--num-words {self.num_words}: a list has {COMMON} common words; use at least {COMMON}")
        if self.data is not None:
            need_file(self.data, "a text file of one word per line")
        elif self.num_words > len(OWN_WORDS):
            raise UserError(f"--num-words {self.num_words}: there are {len(OWN_WORDS)} words; use fewer, or --data FILE")

    @property
    def _repeats(self) -> tuple[int, int]:
        return (6, 1) if self.short_lists else (30, 3)

    @property
    def num_items(self) -> int:
        return (self.num_words - COMMON) * self._repeats[1] + 1 if self.placing == "together" else 1

    @property
    def max_new_tokens(self) -> int:
        return 120

    def examples(self, split: Split, count: int | None, seed: int) -> list[Example]:
        """The first `count` examples of the split, each from its own random stream."""
        size = 12 * self._entries
        count = generated_count(count, "lists", f"--num-words {self.num_words}", size, "--limit or --num-words")
        words = OWN_WORDS if self.data is None else self._read(self.data)
        return [self._generate(words, split, index, seed) for index in range(count)]

    def prompt(self, example: Example, slot: int, position: int | None = None) -> Prompt:
        """The example in its order; with `together` the common words come before the word at `slot` of the others."""
        own_position = position_of(slot, self.num_items)  # refuses a slot that does not exist
        common = example.words[:COMMON]
        words = _shuffled(example.words, self._repeats, example.order)
        if self.placing == "together":
            block, others = [word for word in words if word in common], [word for word in words if word not in common]
            words = [*others[:slot], *block, *others[slot:]]
        shot = _shuffled(example.shot, (3, 1) if self.short_lists else (10, 3), example.shot_order)
        answer = _numbered(sorted(common, key=words.index))
        return Prompt(
            text=QUESTION.format(context=_numbered(shot))
            + _numbered(example.shot[:COMMON])
            + "\n"
            + QUESTION.format(context=_numbered(words)),
            answers=(answer, f" {answer}"),
            gold=answer,
            example=example.id,
            position=own_position if position is None else position,
            slot=slot,
            num_items=self.num_items,
            golds=common,
        )

    @property
    def _entries(self) -> int:
        common, others = self._repeats
        return COMMON * common + (self.num_words - COMMON) * others

    @property
    def _shot_words(self) -> int:
        return 20 if self.short_lists else 40

    def _generate(self, words: Sequence[str], split: Split, index: int, seed: int) -> Example:
        # See key_value.py: string seeds and getrandbits give the same values on every platform.
        rng = random.Random(f"lpes cwe {seed} {split} {index}")
        candidates = words if split == "all" else [word for word in words if split_of(word) == split]
        first = one_of(candidates, rng)
        left = [word for word in words if word != first]
        chosen = [left.pop(rng.getrandbits(32) % len(left)) for _ in range(self.num_words - 1)]
        if len(left) < self._shot_words:
            left += chosen  # RULER always draws the solved example's words from the same list
        shot = [left.pop(rng.getrandbits(32) % len(left)) for _ in range(self._shot_words)]
        return Example((first, *chosen), tuple(shot), rng.getrandbits(32), rng.getrandbits(32))

    def _read(self, path: Path) -> tuple[str, ...]:
        try:
            words = _words_of(path, path.stat().st_mtime_ns)
        except UNREADABLE as error:
            raise UserError(f"--data {path}: not readable as UTF-8 text ({error})") from error
        needed = max(self.num_words, 2 * self._shot_words)
        if len(words) < needed:
            raise UserError(f"--data {path}: {len(words)} different words, but {needed} are needed; use fewer --num-words")
        return words


@lru_cache(4)
def _words_of(path: Path, modified: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line.strip() for line in read_text(path).splitlines() if line.strip()))


def _shuffled(words: Sequence[str], repeats: tuple[int, int], order: int) -> list[str]:
    written = [*list(words[:COMMON]) * repeats[0], *list(words[COMMON:]) * repeats[1]]
    random.Random(order).shuffle(written)
    return written


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
