"""A needle in a haystack, modelled on RULER (Hsieh et al., 2024), generated offline without essays or downloads.

    A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number
    afterwards.
    The old miller carried a lamp to the harbour before noon. ... One of the special magic numbers for brave-otter is: 4081973.
    ... Every young tailor ...
    What is the special magic number for brave-otter mentioned in the provided text? The special magic number for brave-otter
    mentioned in the provided text is

Instruction, needle and question are RULER's. The filler consists of sentences from a seeded grammar, identical on every
platform. The items are the filler's sentences and the needle; the needle's slot among them is its depth. `with_length` gives
the task with as many sentences as fit a number of tokens, for a heat map of depth x length.

With num_keys > 1, needles with other keys are at random slots (RULER's multi-key). With num_queries > 1, a prompt asks for
several of them (multi-query): the first is at the slot, and the score is the share of values found. Every example has its own
filler, keys and values. A hash of its key assigns it to `search` (40 %) or `test` (60 %).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.tasks.data import content_id, generated_count, split_of
from lpes_jax.tasks.prompts import Prompt, Split, Tokenizer, token_ids
from lpes_jax.tasks.prompts import position as position_of
from lpes_jax.tasks.recall import Recall

ONE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number "
    "afterwards.\n{context}\nWhat is the special magic number for {query} mentioned in the provided text? "
    "The special magic number for {query} mentioned in the provided text is"
)
SEVERAL = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "numbers afterwards.\n{context}\nWhat are all the special magic numbers for {query} mentioned in the provided text? "
    "The special magic numbers for {query} mentioned in the provided text are"
)
NEEDLE = "One of the special magic numbers for {key} is: {value}."

_WHO = "miller tailor farmer sailor baker painter teacher doctor shepherd carpenter gardener merchant clerk driver".split()
_HOW = "old young tall quiet cheerful tired careful clever friendly patient busy curious".split()
_DID = "carried brought sent showed gave sold lent returned handed promised".split()
_WHAT = "lamp basket letter ladder blanket kettle map violin coat bucket clock mirror".split()
_WHERE = "harbour market station bridge garden school library mill tavern church forest square".split()
_WHEN = "before noon, after the rain, in the evening, on Sunday, at dawn, last winter, in early spring, without a word".split(
    ", "
)
_ADJECTIVES = (
    "brave calm eager fancy gentle happy jolly kind lively mighty nimble proud quick rapid shiny sunny tidy witty".split()
)
_ANIMALS = "otter falcon badger lynx heron salmon beetle walrus panda raven tiger moose gecko koala ferret turtle".split()


@dataclass(frozen=True)
class Example:
    """(key, value) of each needle, the ones asked for first; the slots of all but the first; and the filler's sentences."""

    needles: tuple[tuple[str, str], ...]
    other_slots: tuple[int, ...]
    filler: tuple[str, ...]

    @property
    def id(self) -> str:
        return content_id(self.needles, self.other_slots, self.filler)


@dataclass(frozen=True)
class Needle(Recall):
    """The task `needle`.

    Attributes:
        num_sentences: Sentences of filler in a prompt.
        num_keys: Needles in a prompt.
        num_queries: How many of them the prompt asks for.
    """

    num_sentences: int = 100
    num_keys: int = 1
    num_queries: int = 1

    name: ClassVar[str] = "needle"

    def __post_init__(self):
        check_bounds(self)
        if self.num_queries > self.num_keys:
            raise UserError(
                f"--num-queries {self.num_queries} and --num-keys {self.num_keys}: a prompt has too few needles to ask for"
            )

    @property
    def num_items(self) -> int:
        return self.num_sentences + 1

    def with_length(self, tokens: int, tokenizer: Tokenizer) -> "Needle":
        """The task with the most sentences whose prompts have at most `tokens` tokens, by the longest of eight prompts.

        Sentences differ by a few tokens, so leave a margin if `tokens` is the window. Raises UserError for too few tokens.
        """

        def longest(num_sentences: int) -> int:
            task = replace(self, num_sentences=num_sentences)
            prompts = [task.prompt(example, 0) for example in task.examples("all", 8, seed=0)]
            return max(len(ids) for ids in token_ids(tokenizer, [prompt.text + prompt.answers[0] for prompt in prompts]))

        one, many = longest(1), longest(101)
        low = 1 + max(0, int((tokens - one) / ((many - one) / 100)))  # close, because sentences have similar lengths
        while low > 1 and longest(low) > tokens:
            low -= 1
        while longest(low + 1) <= tokens:
            low += 1
        if longest(low) > tokens:
            raise UserError(f"--lengths: {tokens} tokens are too few; a prompt with one sentence of filler has {one}")
        return replace(self, num_sentences=low)

    def examples(self, split: Split, count: int | None, seed: int) -> list[Example]:
        """The first `count` examples of the split, each from its own random stream."""
        size = 80 * self.num_sentences
        count = generated_count(count, "needles", f"--num-sentences {self.num_sentences}", size, "--limit or --num-sentences")
        return [self._generate(split, index, seed) for index in range(count)]

    def prompt(self, example: Example, slot: int, position: int | None = None) -> Prompt:
        """The example with the first needle before the sentence at `slot`, or after the last; the rest keeps its order."""
        own_position = position_of(slot, self.num_items)  # refuses a slot that does not exist
        sentences = [[sentence] for sentence in (*example.filler, "")]
        for other_slot, (key, value) in zip(example.other_slots, example.needles[1:], strict=True):
            sentences[other_slot].insert(0, NEEDLE.format(key=key, value=value))
        key, value = example.needles[0]
        sentences[slot].insert(0, NEEDLE.format(key=key, value=value))
        asked = example.needles[: self.num_queries]
        text = (ONE if len(asked) == 1 else SEVERAL).format(
            context=" ".join(sentence for group in sentences for sentence in group if sentence),
            query=listed([key for key, _ in asked]),
        )
        values = [value for _, value in asked]
        return Prompt(
            text=text,
            answers=(" " + listed(values),),
            gold=listed(values),
            example=example.id,
            position=own_position if position is None else position,
            slot=slot,
            num_items=self.num_items,
            golds=tuple(values),
        )

    def _generate(self, split: Split, index: int, seed: int) -> Example:
        # See key_value.py: string seeds and getrandbits give the same values on every platform.
        rng = random.Random(f"lpes needle {seed} {split} {index}")

        needles: dict[str, str] = {}
        while len(needles) < self.num_keys:
            key = f"{one_of(_ADJECTIVES, rng)}-{one_of(_ANIMALS, rng)}"
            value = str(10**6 + rng.getrandbits(32) % (9 * 10**6))
            if key not in needles and value not in needles.values() and split in ("all", split_of(key)):
                needles[key] = value
        other_slots = tuple(rng.getrandbits(32) % self.num_items for _ in range(self.num_keys - 1))
        return Example(tuple(needles.items()), other_slots, tuple(sentence(rng) for _ in range(self.num_sentences)))


def sentence(rng: random.Random) -> str:
    """A sentence of filler; it draws eight words from `rng`."""
    who, what = f"{one_of(_HOW, rng)} {one_of(_WHO, rng)}", f"{one_of(_DID, rng)} a {one_of(_WHAT, rng)}"
    whom = f"{one_of(_HOW, rng)} {one_of(_WHO, rng)}"
    return f"The {who} {what} to the {whom} at the {one_of(_WHERE, rng)} {one_of(_WHEN, rng)}."


def one_of(words: Sequence[str], rng: random.Random) -> str:
    """One of the words, identical in every version of Python."""
    return words[rng.getrandbits(32) % len(words)]


def listed(words: Sequence[str]) -> str:
    """The words as RULER's questions list them: `a, b, and c`; two words as `a, and b`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f", and {words[-1]}"
