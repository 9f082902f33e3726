"""RULER's needles in a haystack (Hsieh et al., 2024), with control over the depth of the fact.

    A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number
    afterwards.
    One of the special magic numbers for brave-otter is: 4081973.
    One of the special magic numbers for ...
    What is the special magic number for brave-otter mentioned in the provided text? The special magic number for brave-otter
    mentioned in the provided text is

Instruction, needles, question, answer prefix and score equal those of NVIDIA/RULER (Apache-2.0),
`scripts/data/synthetic/niah.py` and `scripts/eval/synthetic/constants.py`, byte for byte; the code is our own. The variants are
those of its `synthetic.yaml`:

    subset       haystack   key    value    what is hidden
    single_1     noise      words  number   one needle among the five sentences that RULER repeats
    single_2     essay      words  number   one needle in an essay
    single_3     essay      words  UUID     the same
    multikey_1   essay      words  number   one needle, and three with other keys
    multikey_2   needles    words  number   one needle among lines that are all needles
    multikey_3   needles    UUID   UUID     the same
    multivalue   essay      words  number   four values of one key, all asked for
    multiquery   essay      words  number   four keys, all asked for
    near_keys    essay      words  number   ours: one needle, and seven whose keys share a word with the key asked for

An answer may also begin with a colon (`prefix`, and the likelihood of a search): after "... is" some models write one.

Differences from RULER: the needle's slot is given, while RULER draws it (of several needles the first is at the slot, the
others at random slots); keys and values of a prompt differ from each other; keys consist of our own words (`words.py`), while
RULER uses the package wonderwords. Essays are the sentences of a text file (`data`, from its beginning, as RULER reads Paul
Graham's essays). A simple rule finds the ends of sentences, where RULER uses nltk. Without a file, essays are generated
sentences of the task `needle`, different ones in each example.

`queries_per_haystack` > 1, for multikey_2 and multikey_3 only, asks several questions about the same lines, like the task `kv`:
the lines stay in place, and the questions ask for those nearest to the slot. Every example has its own keys, values and
sentences. A hash of its key assigns it to `search` (40 %) or `test` (60 %).
"""

import random
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.tasks.data import content_id, generated_count, need_file, split_of
from lpes_jax.tasks.metrics import substring
from lpes_jax.tasks.needle import listed, one_of, sentence
from lpes_jax.tasks.prompts import Prompt, Split
from lpes_jax.tasks.prompts import position as position_of
from lpes_jax.tasks.recall import Recall
from lpes_jax.tasks.words import ADJECTIVES, NOUNS
from lpes_jax.text_files import UNREADABLE, read_text

Haystack = Literal["noise", "essay", "needles"]
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the {kind} "
    "afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text is"
)
SEVERAL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text are"
)


class Variant(NamedTuple):
    """A row of the table above; `kind` is the kind of the values."""

    haystack: Haystack
    key: Literal["words", "uuids"] = "words"
    kind: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    near: bool = False


VARIANTS = {
    "single_1": Variant("noise"),
    "single_2": Variant("essay"),
    "single_3": Variant("essay", kind="uuids"),
    "multikey_1": Variant("essay", keys=4),
    "multikey_2": Variant("needles"),
    "multikey_3": Variant("needles", key="uuids", kind="uuids"),
    "multivalue": Variant("essay", values=4),
    "multiquery": Variant("essay", keys=4, queries=4),
    "near_keys": Variant("essay", keys=8, near=True),
}


@dataclass(frozen=True)
class Example:
    """(key, value) of each needle, those asked for first; the slots of all but the first; and the haystack's lines."""

    needles: tuple[tuple[str, str], ...]
    other_slots: tuple[int, ...]
    lines: tuple[str, ...]

    @property
    def id(self) -> str:
        return content_id(self.needles, self.other_slots, self.lines)


@dataclass(frozen=True)
class Question:
    """One of several questions about needles that keep their order."""

    needles: tuple[tuple[str, str], ...]
    number: int

    @property
    def id(self) -> str:
        return content_id(self.needles, self.number)

    def slot(self, slot: int) -> int:
        """The slot of the needle asked for: the nearest to `slot` for question 0, the next for 1, ..."""
        return sorted(range(len(self.needles)), key=lambda other: abs(other - slot))[self.number]


@dataclass(frozen=True)
class Niah(Recall):
    """The task `niah`.

    Attributes:
        subset: RULER's variant, or near_keys: see above.
        num_lines: Lines of the haystack (sentences of an essay) in addition to the needles; 0 keeps only the needles.
        data: A text file for the essay; None generates its sentences.
        num_keys: Needles of multikey_1 (default 4) and near_keys (default 8).
        queries_per_haystack: The number of consecutive examples that ask about the same lines.

    Raises:
        UserError: Invalid settings. From `examples`: the file cannot be read or is too short.
    """

    subset: str = "single_1"
    num_lines: int = 100
    data: Path | None = None
    num_keys: int | None = None
    queries_per_haystack: int = 1

    name: ClassVar[str] = "niah"

    def __post_init__(self):
        check_bounds(self)
        if self.subset not in VARIANTS:
            raise UserError(f"--subset {self.subset!r} is not a variant of --task niah, which are: {', '.join(VARIANTS)}")
        if self.data is not None and self._variant.haystack != "essay":
            raise UserError(f"--data: the haystack of --subset {self.subset} is not an essay; remove --data")
        if self.data is not None:
            need_file(self.data, "any text file in UTF-8")
        if self.num_keys is not None and self.subset not in ("multikey_1", "near_keys"):
            raise UserError(f"--num-keys: --subset {self.subset} has RULER's number of needles; remove --num-keys")
        if self.queries_per_haystack > 1 and self._variant.haystack != "needles":
            raise UserError("--queries-per-haystack above 1 is for --subset multikey_2 and multikey_3")
        if not 1 <= self.queries_per_haystack <= max(1, self.num_lines):
            raise UserError(
                f"--queries-per-haystack {self.queries_per_haystack}: must be from 1 to --num-lines ({self.num_lines}); "
                "otherwise every position would ask about all lines"
            )

    @property
    def _variant(self) -> Variant:
        variant = VARIANTS[self.subset]
        return variant if self.num_keys is None else variant._replace(keys=self.num_keys)

    @property
    def num_items(self) -> int:
        return self.num_lines + 1

    @property
    def max_new_tokens(self) -> int:
        return 128

    @property
    def metrics(self) -> tuple[str, ...]:
        several = self._variant.values * self._variant.queries > 1
        return (*super().metrics, "at_slot") if several else super().metrics

    def examples(self, split: Split, count: int | None, seed: int) -> list[Any]:
        """The first `count` examples of the split, each from its own random stream.

        They are `Example`s, or `Question`s if a haystack has several.
        """
        size = 110 * (self.num_lines + 1)
        count = generated_count(count, "needles", f"--num-lines {self.num_lines}", size, "--limit or --num-lines")
        haystacks = range(-(-count // self.queries_per_haystack))
        return [example for index in haystacks for example in self._generate(split, index, seed)][:count]

    def prompt(self, example: Example | Question, slot: int, position: int | None = None) -> Prompt:
        """The example with its first needle before the line at `slot`, or after the last; the rest keeps its order.

        For a `Question`: the question about the line nearest to the slot.
        """
        own_position, variant, identity = position_of(slot, self.num_items), self._variant, example.id
        if isinstance(example, Question):
            slot = example.slot(slot)
            others = [*example.needles[:slot], *example.needles[slot + 1 :]]
            example = Example((example.needles[slot],), (), tuple(self._needle(key, value) for key, value in others))
        texts = [self._needle(key, value) for key, value in example.needles]
        inserts = sorted(zip((slot, *example.other_slots), texts, strict=True), key=lambda insert: insert[0])
        context = _in_essay(example.lines, inserts) if variant.haystack == "essay" else _in_lines(example.lines, inserts)
        asked = example.needles[: variant.values * variant.queries]
        several = len(asked) > 1
        text = (SEVERAL if several else ONE).format(
            kind=variant.kind if several else variant.kind[:-1],
            context=context,
            query=listed(list(dict.fromkeys(key for key, _ in asked))),
        )
        values = [value for _, value in asked]
        return Prompt(
            text=text,
            answers=(f" {listed(values)}", f": {listed(values)}"),  # models differ in this, and RULER's score does not see it
            gold=listed(values),
            example=identity,
            position=own_position if position is None else position,
            slot=slot,
            num_items=self.num_items,
            golds=tuple(values),
        )

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        """RULER's score (see `Recall`) and, with several values, `at_slot`: whether the output has the value at the slot."""
        scores = {**super().score(output, prompt), "at_slot": float(substring(output, prompt.references[0]))}
        return {metric: scores[metric] for metric in self.metrics}

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self._variant.kind, key=key, value=value)

    def _generate(self, split: Split, index: int, seed: int) -> list[Example] | list[Question]:
        # See key_value.py: string seeds and getrandbits give the same values on every platform.
        rng, variant = random.Random(f"lpes niah {self.subset} {seed} {split} {index}"), self._variant
        used: set[str] = set()

        def new(kind: str, in_split: bool = False) -> str:
            text = _drawn(kind, rng)
            while text in used or (in_split and split not in ("all", split_of(text))):
                text = _drawn(kind, rng)
            used.add(text)
            return text

        def near(key: str) -> str:
            adjective, noun = key.split("-")
            while True:
                other = f"{adjective}-{one_of(NOUNS, rng)}" if rng.getrandbits(1) else f"{one_of(ADJECTIVES, rng)}-{noun}"
                if other not in used:
                    used.add(other)
                    return other

        needles = []
        for number in range(variant.keys):
            key = near(needles[0][0]) if variant.near and number else new(variant.key, number < variant.queries)
            needles += [(key, new(variant.kind)) for _ in range(variant.values)]
        other_slots = tuple(rng.getrandbits(32) % self.num_items for _ in needles[1:])
        if self.queries_per_haystack > 1:
            needles += [(new(variant.key, True), new(variant.kind)) for _ in range(self.num_lines)]
            return [Question(tuple(needles), number) for number in range(self.queries_per_haystack)]
        if variant.haystack == "noise":
            lines = [NOISE] * self.num_lines
        elif variant.haystack == "needles":
            lines = [self._needle(new(variant.key), new(variant.kind)) for _ in range(self.num_lines)]
        elif self.data is None:
            lines = [sentence(rng) for _ in range(self.num_lines)]
        else:
            lines = self._essay(self.data)
        return [Example(tuple(needles), other_slots, tuple(lines))]

    def _essay(self, path: Path) -> Sequence[str]:
        try:
            sentences = sentences_of(path, path.stat().st_mtime_ns)
        except UNREADABLE as error:
            raise UserError(f"--data {path}: not readable as UTF-8 text ({error})") from error
        if len(sentences) < self.num_lines:
            raise UserError(f"--data {path} has {len(sentences)} sentences; use --num-lines {len(sentences)} or less")
        return sentences[: self.num_lines]


@lru_cache(4)
def sentences_of(path: Path, modified: int) -> tuple[str, ...]:
    """The sentences of a text: each ends in a full stop, question or exclamation mark, including quotes after it."""
    text = " ".join(read_text(path).split())
    return tuple(re.findall(r"\S.*?[.!?][\"'”’)]*(?= |$)|\S.*$", text))


def _drawn(kind: str, rng: random.Random) -> str:
    if kind == "words":
        return f"{one_of(ADJECTIVES, rng)}-{one_of(NOUNS, rng)}"
    if kind == "numbers":
        return str(10**6 + rng.getrandbits(32) % (9 * 10**6))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _in_lines(lines: Sequence[str], inserts: Sequence[tuple[int, str]]) -> str:
    """The lines with each needle as a line of its own, before the line at its slot."""
    written = list(lines)
    for slot, text in reversed(inserts):
        written.insert(slot, text)
    return "\n".join(written)


def _in_essay(sentences: Sequence[str], inserts: Sequence[tuple[int, str]]) -> str:
    """The sentences with the needles between them. As in RULER, a needle at the very beginning follows a space."""
    parts, last = [], 0
    for slot, text in inserts:
        parts += [" ".join(sentences[last:slot]), text]
        last = slot
    return " ".join([*parts, " ".join(sentences[last:])])
