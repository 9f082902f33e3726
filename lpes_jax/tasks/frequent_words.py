"""RULER's frequent words (Hsieh et al., 2024): which three coded words are the most frequent in a text?

    Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded
    words. gulkyz ... ... mfkbjz kpnyfs kpnyfs ... gulkyz ... Question: Do not provide any explanation. Please ignore the dots
    '....'. What are the three most frequently appeared words in the above coded text? Answer: According to the coded text
    above, the three most frequently appeared words are:

Template, answer prefix, frequencies and score equal those of NVIDIA/RULER (Apache-2.0),
`scripts/data/synthetic/freq_words_extraction.py`, byte for byte; the code is our own. The word of rank k occurs
num_words / (k^alpha zeta(alpha)) times, rounded down; rank 1 is the dots. Unlike in RULER, each example has its own words and
its own seed of their order.

With `placing="spread"`, as in RULER, all words are in a random order, and there are no positions. With `together`, the words
asked for form one block at the slot, in a random order within the block, which controls their depth.

A hash of the most frequent word assigns an example to `search` (40 %) or `test` (60 %).
"""

import random
import string
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lpes_jax.choices import Placing
from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.tasks.data import content_id, generated_count, split_of
from lpes_jax.tasks.prompts import Prompt, Split
from lpes_jax.tasks.prompts import position as position_of
from lpes_jax.tasks.recall import Recall

QUESTION = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded "
    "words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
    "frequently appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
    "appeared words are:"
)
DOTS = "..."
_LETTERS = 6
_ASKED = slice(1, 4)  # ranks


@dataclass(frozen=True)
class Example:
    """The coded words by rank, the dots first, and the seed of their order in the text."""

    words: tuple[str, ...]
    order: int

    @property
    def id(self) -> str:
        return content_id(self.words, self.order)


@dataclass(frozen=True)
class FrequentWords(Recall):
    """The task `fwe`.

    Attributes:
        num_words: Words of a text (RULER's number, before rounding).
        alpha: The exponent by which frequencies fall with the rank.
        placing: See above.

    Raises:
        UserError: Invalid settings.
    """

    num_words: int = 500
    alpha: float = 2.0
    placing: Placing = "spread"

    name: ClassVar[str] = "fwe"

    def __post_init__(self):
        check_bounds(self)
        counts = self._counts(6)
        if not counts[3] > counts[4]:
            raise UserError(
                f"--num-words {self.num_words} and --alpha {self.alpha:g}: the third and the fourth word would occur equally "
                f"often ({counts[3]} and {counts[4]} times); use more words"
            )

    @property
    def num_items(self) -> int:
        if self.placing == "spread":
            return 1
        counts = self._counts()
        return int(counts.sum() - counts[_ASKED].sum()) + 1

    @property
    def max_new_tokens(self) -> int:
        return 50

    def examples(self, split: Split, count: int | None, seed: int) -> list[Example]:
        """The first `count` examples of the split, each from its own random stream."""
        size = 7 * self.num_words
        count = generated_count(count, "words", f"--num-words {self.num_words}", size, "--limit or --num-words")
        return [self._generate(split, index, seed) for index in range(count)]

    def prompt(self, example: Example, slot: int, position: int | None = None) -> Prompt:
        """The example in its order; with `together` the words asked for come before the word at `slot` of the others."""
        own_position = position_of(slot, self.num_items)  # refuses a slot that does not exist
        counts = self._counts(len(example.words))
        asked = example.words[_ASKED]
        text = [word for word, times in zip(example.words, counts, strict=True) for _ in range(times)]
        random.Random(example.order).shuffle(text)
        if self.placing == "together":
            block, others = [word for word in text if word in asked], [word for word in text if word not in asked]
            text = [*others[:slot], *block, *others[slot:]]
        return Prompt(
            text=QUESTION.format(context=" ".join(text)),
            answers=(" " + ", ".join(asked),),
            gold=", ".join(asked),
            example=example.id,
            position=own_position if position is None else position,
            slot=slot,
            num_items=self.num_items,
            golds=asked,
        )

    def _counts(self, words: int | None = None) -> np.ndarray:
        """How often the word of each rank occurs in a text; `words` None: for all ranks that occur."""
        rank = np.arange(1, (words or self._num_ranks()) + 1)
        return (self.num_words * (rank**-self.alpha) / _zeta(self.alpha)).astype(int)

    def _num_ranks(self) -> int:
        return max(4, int((self.num_words / _zeta(self.alpha)) ** (1 / self.alpha)))

    def _generate(self, split: Split, index: int, seed: int) -> Example:
        # See key_value.py: string seeds and getrandbits give the same values on every platform.
        rng = random.Random(f"lpes fwe {seed} {split} {index}")
        words = [DOTS]
        while len(words) < self._num_ranks():
            word = "".join(string.ascii_lowercase[rng.getrandbits(32) % 26] for _ in range(_LETTERS))
            if word not in words and (len(words) > 1 or split in ("all", split_of(word))):
                words.append(word)
        return Example(tuple(words), rng.getrandbits(32))


def _zeta(alpha: float) -> float:
    """Riemann's zeta function."""
    from scipy.special import zeta  # here, as importing it takes longer than all tasks together

    return float(zeta(alpha))
