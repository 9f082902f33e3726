"""RULER's needles in a haystack (Hsieh et al., 2024), with the depth of the fact under control.

    A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number
    afterwards.
    One of the special magic numbers for brave-otter is: 4081973.
    One of the special magic numbers for ...
    What is the special magic number for brave-otter mentioned in the provided text? The special magic number for brave-otter
    mentioned in the provided text is

Instruction, needles, question, answer prefix and score are those of NVIDIA/RULER (Apache-2.0), `scripts/data/synthetic/niah.py`
and `scripts/eval/synthetic/constants.py`, to the byte; the code is written anew. The variants are those of its
`synthetic.yaml`:

    subset       haystack   key    value    what is hidden
    single_1     noise      words  number   one needle among the five sentences that RULER repeats
    single_2     essay      words  number   one needle in an essay
    single_3     essay      words  UUID     the same
    multikey_1   essay      words  number   one needle, and three with other keys
    multikey_2   needles    words  number   one needle among lines that are all needles
    multikey_3   needles    UUID   UUID     the same
    multivalue   essay      words  number   four values of one key, all asked for
    multiquery   essay      words  number   four keys, all asked for
    near_keys    essay      words  number   ours: one needle, and seven whose keys share a word with the key that is asked for

Where this differs from RULER: the needle's slot is given, where RULER draws it (of several needles the first stands at the
slot, the others at random places); keys and values of a prompt differ from each other; keys are of our own words (`words.py`),
where RULER's come from the package wonderwords. Essays are the sentences of a text file (`data`, from its beginning, as RULER
reads Paul Graham's essays), cut at the ends of sentences by a simple rule, where RULER asks nltk; without a file they are the
generated sentences of the task `needle`, other ones in each example.

`queries_per_haystack` > 1, of multikey_2 and multikey_3 alone, asks several questions about the same lines, as the task `kv`
does: the lines stay, and the questions ask for those nearest to the slot. Every example has keys, values and sentences of its
own. Its key decides by a hash whether it belongs to `search` (40 %) or `test` (60 %).
"""

import random
import re
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds, check_text_size
from lpes_jax.tasks.data import content_id, need_file, split_of
from lpes_jax.tasks.metrics import contains, normalise, substring
from lpes_jax.tasks.needle import listed, one_of, sentence
from lpes_jax.tasks.prompts import Generation, Prompt, Split
from lpes_jax.tasks.prompts import position as position_of
from lpes_jax.tasks.words import ADJECTIVES, NOUNS
from lpes_jax.text_files import OtherEncoding, read_text

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
    """A row of the table above; `kind` is of the values."""

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
    """(key, value) of each needle, those asked for first; the line that each but the first stands before; the haystack's
    lines."""

    needles: tuple[tuple[str, str], ...]
    others_at: tuple[int, ...]
    lines: tuple[str, ...]

    @property
    def id(self) -> str:
        return content_id(self.needles, self.others_at, self.lines)


@dataclass(frozen=True)
class Question:
    """The question with this number about needles that stay in their order."""

    needles: tuple[tuple[str, str], ...]
    number: int

    @property
    def id(self) -> str:
        return content_id(self.needles, self.number)

    def slot(self, slot: int) -> int:
        """Where the needle asked for stands: the nearest to `slot` for question 0, the next for 1, ..."""
        return sorted(range(len(self.needles)), key=lambda at: abs(at - slot))[self.number]


@dataclass(frozen=True)
class Niah(Generation):
    """The task `niah`.

    subset: RULER's variant, or near_keys: see above.
    num_lines: lines of the haystack (of an essay: sentences) beside the needles; 0 leaves the needles alone.
    data: a text file for the essay; None generates its sentences.
    num_keys: needles of multikey_1 (4) and near_keys (8).
    queries_per_haystack: so many examples in turn are questions about the same lines.

    Raises UserError for settings that cannot be; `examples` does for a file that cannot be read or is too short.
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
            raise UserError(f"--subset {self.subset!r} is no variant of --task niah; they are: {', '.join(VARIANTS)}")
        if self.data is not None and self._variant.haystack != "essay":
            raise UserError(f"--data: the haystack of --subset {self.subset} is no essay; leave it out")
        if self.data is not None:
            need_file(self.data, "any text file in UTF-8")
        if self.num_keys is not None and self.subset not in ("multikey_1", "near_keys"):
            raise UserError(f"--num-keys: --subset {self.subset} has as many needles as RULER's; leave it out")
        if self.queries_per_haystack > 1 and self._variant.haystack != "needles":
            raise UserError("--queries-per-haystack above 1 is for --subset multikey_2 and multikey_3")
        if self.queries_per_haystack > self.num_lines + 1:
            raise UserError(
                f"--queries-per-haystack {self.queries_per_haystack}: one prompt asks for one of its {self.num_lines + 1} "
                "lines, so it goes from 1 to one above --num-lines"
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
    def plain(self) -> None:
        return None

    @property
    def metrics(self) -> tuple[str, ...]:
        several = self._variant.values * self._variant.queries > 1
        return ("recall", "recall_bounded", "at_slot") if several else ("recall", "recall_bounded")

    def examples(self, split: Split, count: int | None, seed: int) -> list[Any]:
        """The first `count` examples of the split, each from a random stream of its own.

        Of type `Example`, or `Question` where a haystack has several.
        """
        if count is None or count < 0:
            raise UserError(f"--limit must not be negative, got {count}" if count else "generated needles need a --limit")
        check_text_size(count, f"--num-lines {self.num_lines}", 110 * (self.num_lines + 1), "--limit or --num-lines")
        haystacks = range(-(-count // self.queries_per_haystack))
        return [example for index in haystacks for example in self._generate(split, index, seed)][:count]

    def prompt(self, example: Example | Question, slot: int, position: int | None = None) -> Prompt:
        """The example with its first needle before the line at `slot`, or behind the last; all else keeps its order.

        Or the question about the line nearest to the slot.
        """
        own_position, variant, identity = position_of(slot, self.num_items), self._variant, example.id
        if isinstance(example, Question):
            slot = example.slot(slot)
            others = [*example.needles[:slot], *example.needles[slot + 1 :]]
            example = Example((example.needles[slot],), (), tuple(self._needle(key, value) for key, value in others))
        texts = [self._needle(key, value) for key, value in example.needles]
        places = sorted(zip((slot, *example.others_at), texts, strict=True), key=lambda place: place[0])
        context = _in_essay(example.lines, places) if variant.haystack == "essay" else _in_lines(example.lines, places)
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
            answers=(" " + listed(values),),
            gold=listed(values),
            example=identity,
            position=own_position if position is None else position,
            slot=slot,
            num_items=self.num_items,
            golds=tuple(values),
        )

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        """RULER's string_match_all, the share of the values asked for that stand anywhere in the output; the same at word ends
        only; and, where there are several, whether the one at the slot does."""
        golds, said = prompt.references, normalise(output)
        scores = {
            "recall": sum(substring(output, gold) for gold in golds) / len(golds),
            "recall_bounded": sum(contains(said, normalise(gold), bounded=True) for gold in golds) / len(golds),
            "at_slot": float(substring(output, golds[0])),
        }
        return {metric: scores[metric] for metric in self.metrics}

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self._variant.kind, key=key, value=value)

    def _generate(self, split: Split, index: int, seed: int) -> list[Example] | list[Question]:
        # As in key_value.py: a string seeds the same everywhere, and getrandbits is the bare Mersenne Twister.
        rng, variant = random.Random(f"lpes niah {self.subset} {seed} {split} {index}"), self._variant
        used: set[str] = set()

        def new(kind: str, of_split: bool = False) -> str:
            text = _drawn(kind, rng)
            while text in used or (of_split and split not in ("all", split_of(text))):
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
        others_at = tuple(rng.getrandbits(32) % self.num_items for _ in needles[1:])
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
        return [Example(tuple(needles), others_at, tuple(lines))]

    def _essay(self, path: Path) -> Sequence[str]:
        try:
            sentences = sentences_of(path, path.stat().st_mtime_ns)
        except (OSError, EOFError, zlib.error, OtherEncoding, UnicodeDecodeError) as error:
            raise UserError(f"--data {path}: not readable as UTF-8 text ({error})") from error
        if len(sentences) < self.num_lines:
            raise UserError(f"--data {path} has {len(sentences)} sentences; use --num-lines {len(sentences)} or less")
        return sentences[: self.num_lines]


@lru_cache(4)
def sentences_of(path: Path, modified: int) -> tuple[str, ...]:
    """The sentences of a text: what ends in a full stop, a question or an exclamation mark, with the quotes behind it."""
    text = " ".join(read_text(path).split())
    return tuple(re.findall(r"\S.*?[.!?][\"'”’)]*(?= |$)|\S.*$", text))


def _drawn(kind: str, rng: random.Random) -> str:
    if kind == "words":
        return f"{one_of(ADJECTIVES, rng)}-{one_of(NOUNS, rng)}"
    if kind == "numbers":
        return str(10**6 + rng.getrandbits(32) % (9 * 10**6))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _in_lines(lines: Sequence[str], places: Sequence[tuple[int, str]]) -> str:
    """The lines with each needle on one of its own, before the line that it is to stand before."""
    written = list(lines)
    for at, text in reversed(places):
        written.insert(at, text)
    return "\n".join(written)


def _in_essay(sentences: Sequence[str], places: Sequence[tuple[int, str]]) -> str:
    """The sentences with the needles between them. As in RULER, no sentence before a needle leaves a space there."""
    parts, last = [], 0
    for at, text in places:
        parts += [" ".join(sentences[last:at]), text]
        last = at
    return " ".join([*parts, " ".join(sentences[last:])])
