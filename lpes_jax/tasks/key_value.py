"""Key-value retrieval of lost-in-the-middle (Liu et al., 2024): find the value of one key among many random pairs.

    Extract the value corresponding to the specified key in the JSON object below.

    JSON data:
    {"2a8d601d-...": "703a7ce5-...",
     "9f4a92b9-...": "d1ff29be-..."}

    Key: "9f4a92b9-..."
    Corresponding value:

The template is theirs byte for byte. An opener follows it, ` "` by default: small models often know the value but fail on how
an answer begins. With the opener in the question, the task measures retrieval. With `answer_opener=None` nothing follows the
template, and each of `openers` is admitted before the value.

Examples come from a seeded generator, identical on every platform, or from lost-in-the-middle's files
(`kv-retrieval-75_keys.jsonl.gz`, 140 and 300: lines of ordered_kv_records, key, value). A hash of the gold key assigns every
example to `search` (40 %) or `test` (60 %). The two never overlap, for any seeds, counts and files. `all` is both.

`queries_per_haystack` > 1 asks several questions about the same pairs. The pairs then stay in place and the questions move: at
a position they ask for the keys nearest to it, one key per prompt. All prompts of a haystack, at all positions, are therefore
equal up to the key at their end, and the shared part is computed once. All keys of a generated haystack belong to the example's
split; in a file's row, those that are asked for do.
"""

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.tasks.data import content_id, generated_count, json_rows, split_of, take
from lpes_jax.tasks.metrics import substring
from lpes_jax.tasks.prompts import Generation, Prompt, Split
from lpes_jax.tasks.prompts import position as position_of

INSTRUCTION = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
TEMPLATE = INSTRUCTION + 'JSON data:\n{{{records}}}\n\nKey: "{key}"\nCorresponding value:'
QUERY_AWARE_TEMPLATE = INSTRUCTION + 'Key: "{key}"\n\n' + TEMPLATE.removeprefix(INSTRUCTION)
ROW = "a lost-in-the-middle row (ordered_kv_records as pairs of strings, key, value)"


@dataclass(frozen=True)
class Example:
    """The gold pair and the other pairs in their order."""

    key: str
    value: str
    others: tuple[tuple[str, str], ...]

    @property
    def id(self) -> str:
        return content_id(self.key, self.value, self.others)


@dataclass(frozen=True)
class Question:
    """One of several questions about pairs that keep their order; it may ask for those at the slots `askable`."""

    pairs: tuple[tuple[str, str], ...]
    number: int
    askable: tuple[int, ...]

    @property
    def id(self) -> str:
        return content_id(self.pairs, self.number)

    def slot(self, slot: int) -> int:
        """The slot of the pair asked for: the nearest to `slot` for question 0, the next for 1, ..."""
        return sorted(self.askable, key=lambda askable: abs(askable - slot))[self.number]


@dataclass(frozen=True)
class KeyValue(Generation):
    """The task `kv`.

    Attributes:
        num_pairs: Pairs in a prompt. If a file's rows have more, the gold pair and the first others are used.
        key_length: None for UUIDs (36 characters), or N: keys and values of N lowercase hexadecimal characters.
        data: A .jsonl or .jsonl.gz of lost-in-the-middle; None generates the pairs.
        answer_opener: The end of the prompt, so that the answer is the bare value. None or empty admits `openers` instead.
        openers: What may come before the value.
        query_aware: Whether the key also comes before the data (lost-in-the-middle's query-aware contextualization).
        queries_per_haystack: The number of consecutive examples that ask about the same pairs (see above).

    Raises:
        UserError: Invalid settings. From `examples`: the file cannot be read.
    """

    num_pairs: int
    key_length: int | None = None
    data: Path | None = None
    answer_opener: str | None = ' "'
    openers: tuple[str, ...] = (" ", ' "')
    query_aware: bool = False
    queries_per_haystack: int = 1

    name: ClassVar[str] = "kv"

    def __post_init__(self):
        check_bounds(self)
        if self.key_length is not None:
            if self.data is not None:
                raise UserError("--key-length is for generated pairs; remove it, or --data")
            if 16**self.key_length < self.num_pairs:
                raise UserError(
                    f"--key-length {self.key_length} gives only {16**self.key_length} distinct keys for --num-pairs "
                    f"{self.num_pairs}; use longer keys or fewer pairs"
                )
        if self.data is not None and not self.data.is_file():
            raise UserError(f"--data {self.data}: no such file; remove --data to generate the pairs")
        if not 1 <= self.queries_per_haystack <= max(1, self.num_pairs - 1):
            raise UserError(
                f"--queries-per-haystack {self.queries_per_haystack}: must be from 1 to one below --num-pairs "
                f"({self.num_pairs}); otherwise every position would ask about all pairs"
            )
        if self.queries_per_haystack > 1 and self.key_length is not None and 4 * self.num_pairs > 16**self.key_length:
            raise UserError(
                f"--queries-per-haystack {self.queries_per_haystack}: a split has too few of the {16**self.key_length} keys "
                f"for {self.num_pairs} pairs; use longer keys or fewer pairs"
            )
        if not self.answer_opener and not self.openers:
            raise UserError("without --answer-opener at least one of the admitted --openers is needed")

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("substring",)

    @property
    def num_items(self) -> int:
        return self.num_pairs

    @property
    def plain(self) -> "KeyValue | None":
        """The same questions with nothing after "Corresponding value:"; None if nothing is forced."""
        return replace(self, answer_opener=None) if self.answer_opener else None

    def examples(self, split: Split, count: int | None, seed: int) -> list[Any]:
        """The first `count` examples of the split: `Example`s, or `Question`s if a haystack has several.

        Generated: each example has its own random stream, so a higher count keeps the first examples, and more pairs keep the
        gold pair and the first others. From a file: the rows of the split in the file's order; nothing is shuffled, and `seed`
        has no effect.
        """
        if self.data is None:
            size = self.num_pairs * (2 * (self.key_length or 36) + 8)
            way_out = "--limit, --num-pairs or --key-length"
            count = generated_count(count, "pairs", f"--num-pairs {self.num_pairs}", size, way_out)
            haystacks = [self._generate(split, index, seed) for index in range(-(-count // self.queries_per_haystack))]
            return [example for haystack in haystacks for example in haystack][:count]
        return take(self._read(self.data), split, count, _split, self.data)

    def prompt(self, example: Example | Question, slot: int, position: int | None = None) -> Prompt:
        """The example with its gold pair at `slot`, the others in order; or the question about the pair nearest to it."""
        own_position = position_of(slot, self.num_pairs)  # refuses a slot that does not exist
        if isinstance(example, Question):
            slot, records = example.slot(slot), example.pairs
        else:
            records = [*example.others[:slot], (example.key, example.value), *example.others[slot:]]
        key, value = records[slot]
        # Not json.dumps: the original writes the strings without escapes, one pair per line.
        lines = ",\n ".join(f'"{key}": "{value}"' for key, value in records)
        text = (QUERY_AWARE_TEMPLATE if self.query_aware else TEMPLATE).format(records=lines, key=key)
        forced = self.answer_opener or ""
        others = "\0".join(part for index, record in enumerate(records) if index != slot for part in record)
        return Prompt(
            text=text + forced,
            answers=(value,) if forced else tuple(opener + value for opener in self.openers),
            gold=value,
            example=example.id,
            position=own_position if position is None else position,
            slot=slot,
            num_items=self.num_pairs,
            faults=_faults(value, others),
        )

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        """lost-in-the-middle's accuracy: the value occurs anywhere in the output."""
        return {"substring": float(substring(output, prompt.gold))}

    def _generate(self, split: Split, index: int, seed: int) -> list[Example | Question]:
        # A string seed goes through SHA-512, and getrandbits is the bare Mersenne Twister: identical on every platform.
        rng = random.Random(f"lpes kv {seed} {split} {index}")
        num_split_keys = 1 if self.queries_per_haystack == 1 else self.num_pairs
        records: dict[str, str] = {}
        while len(records) < num_split_keys:
            key, value = self._draw(rng), self._draw(rng)
            while key in records or split not in ("all", split_of(key)):
                key = self._draw(rng)
            records[key] = value
        while len(records) < self.num_pairs:
            other, other_value = self._draw(rng), self._draw(rng)
            if other not in records:
                records[other] = other_value
        return self._asked(list(records.items()), 0, range(self.num_pairs))

    def _asked(self, pairs: list[tuple[str, str]], gold: int, askable: Sequence[int]) -> list[Example | Question]:
        """The examples about pairs in this order."""
        if self.queries_per_haystack == 1:
            return [Example(*pairs[gold], (*pairs[:gold], *pairs[gold + 1 :]))]
        return [Question(tuple(pairs), number, tuple(askable)) for number in range(self.queries_per_haystack)]

    def _draw(self, rng: random.Random) -> str:
        if self.key_length is None:
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return f"{rng.getrandbits(4 * self.key_length):0{self.key_length}x}"

    def _read(self, path: Path) -> list[Example | Question]:
        seen: dict[Example | Question, str] = {}
        examples: list[Example | Question] = []
        for where, row in json_rows(path, ("ordered_kv_records", "key", "value"), ROW):
            asked = self._parse(row, where)
            if asked[0] in seen:
                raise UserError(f"{where}: the same example as {seen[asked[0]]}; remove one")
            seen[asked[0]] = where.rpartition(", ")[2]
            examples += asked
        return examples

    def _parse(self, row: dict[str, Any], where: str) -> list[Example | Question]:
        key, value = row["key"], row["value"]
        try:
            records = [(other, other_value) for other, other_value in row["ordered_kv_records"]]
            if not all(isinstance(text, str) for record in [*records, (key, value)] for text in record):
                raise TypeError("not strings")
        except (ValueError, TypeError) as error:
            raise UserError(f"{where}: not {ROW}") from error
        keys = [other for other, _ in records]
        if len(set(keys)) < len(keys):
            repeated = next(other for other in keys if keys.count(other) > 1)
            raise UserError(f"{where}: the key {repeated!r} is repeated, so the answer is ambiguous; remove one")
        if (key, value) not in records:
            raise UserError(f"{where}: the pair asked for ({key!r}) is not among ordered_kv_records; add it or remove the line")
        if not value.strip():
            raise UserError(f"{where}: the value asked for is {value!r}, which every output contains; give it a value")
        if len(records) < self.num_pairs:
            raise UserError(f"{where}: {len(records)} pairs, but --num-pairs is {self.num_pairs}; use at most {len(records)}")
        others = [record for record in records if record[0] != key][: self.num_pairs - 1]
        kept = dict([(key, value), *others])
        pairs = [record for record in records if record[0] in kept]  # in the row's order
        askable = [slot for slot, (other, text) in enumerate(pairs) if split_of(other) == split_of(key) and text.strip()]
        if len(askable) < self.queries_per_haystack:
            raise UserError(
                f"{where}: only {len(askable)} of its keys have a value and belong to the split of the key asked for; "
                f"use --queries-per-haystack {len(askable)} or less"
            )
        return self._asked(pairs, pairs.index((key, value)), askable)


def _faults(value: str, others: str) -> tuple[str, ...]:
    """Faults of a question for `value` whose other pairs contain the texts `others`."""
    if not any(char.isalnum() for char in value):  # every output in JSON contains quotes and commas
        return ("gold_empty",)
    return ("answer_in_distractors",) if value.lower() in others.lower() else ()


def _split(example: Example | Question) -> Split:
    return split_of(example.key if isinstance(example, Example) else example.pairs[example.askable[0]][0])
