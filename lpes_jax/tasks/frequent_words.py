"""RULER's frequent words (Hsieh et al., 2024): which three coded words stand most often in a text?

    Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded
    words. gulkyz ... ... mfkbjz kpnyfs kpnyfs ... gulkyz ... Question: Do not provide any explanation. Please ignore the dots
    '....'. What are the three most frequently appeared words in the above coded text? Answer: According to the coded text
    above, the three most frequently appeared words are:

Template, answer prefix, the frequencies (the word of rank k stands num_words / (k^alpha zeta(alpha)) times, rounded down, and
that of rank 1 is the dots) and the score are those of NVIDIA/RULER (Apache-2.0),
`scripts/data/synthetic/freq_words_extraction.py`, to the byte; the code is written anew. Where this differs: each example is
shuffled by a seed of its own, and its words differ.

`placing`: `spread` is RULER's, all words in a random order; there are no positions then. `together`: the words asked for stand
in one block at the slot, in a random order among themselves, so that their depth is under control.

The most frequent word decides by a hash whether an example belongs to `search` (40 %) or `test` (60 %).
"""

import random
import string
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lpes_jax.choices import Placing
from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds, check_text_size
from lpes_jax.tasks.data import content_id, split_of
from lpes_jax.tasks.metrics import contains, normalise, substring
from lpes_jax.tasks.prompts import Generation, Prompt, Split
from lpes_jax.tasks.prompts import position as position_of

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
    """The coded words by their rank, the dots first, and the seed of their order in the text."""

    words: tuple[str, ...]
    order: int

    @property
    def id(self) -> str:
        return content_id(self.words, self.order)


@dataclass(frozen=True)
class FrequentWords(Generation):
    """The task `fwe`.

    num_words: words of a text, RULER's number before rounding. alpha: how fast frequencies fall with the rank.
    placing: see above.

    Raises UserError for settings that cannot be.
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
                f"--num-words {self.num_words} and --alpha {self.alpha:g}: the third word would stand {counts[3]} times and "
                f"the fourth {counts[4]} times, so that neither is the more frequent; use more words"
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

    @property
    def plain(self) -> None:
        return None

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("recall", "recall_bounded")

    def examples(self, split: Split, count: int | None, seed: int) -> list[Example]:
        """The first `count` examples of the split, each from a random stream of its own."""
        if count is None or count < 0:
            raise UserError(f"--limit must not be negative, got {count}" if count else "generated words need a --limit")
        check_text_size(count, f"--num-words {self.num_words}", 7 * self.num_words, "--limit or --num-words")
        return [self._generate(split, index, seed) for index in range(count)]

    def prompt(self, example: Example, slot: int, position: int | None = None) -> Prompt:
        """The example in its order; with `together` the words asked for stand before the word at `slot` of the others."""
        own_position = position_of(slot, self.num_items)  # refuses a slot that is not there
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

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        """RULER's string_match_all: the share of the three words that stand anywhere in the output; and at word ends only."""
        said, golds = normalise(output), prompt.references
        return {
            "recall": sum(substring(output, gold) for gold in golds) / len(golds),
            "recall_bounded": sum(contains(said, gold, bounded=True) for gold in golds) / len(golds),
        }

    def _counts(self, words: int | None = None) -> np.ndarray:
        """How often the word of each rank stands in a text; None for all words that do."""
        rank = np.arange(1, (words or self._num_ranks()) + 1)
        return (self.num_words * (rank**-self.alpha) / _zeta(self.alpha)).astype(int)

    def _num_ranks(self) -> int:
        return max(4, int((self.num_words / _zeta(self.alpha)) ** (1 / self.alpha)))

    def _generate(self, split: Split, index: int, seed: int) -> Example:
        # As in key_value.py: a string seeds the same everywhere, and getrandbits is the bare Mersenne Twister.
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
