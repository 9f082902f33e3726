"""Key-value retrieval of lost-in-the-middle (Liu et al., 2024): find the value of one key among many random pairs.

    Extract the value corresponding to the specified key in the JSON object below.

    JSON data:
    {"2a8d601d-...": "703a7ce5-...",
     "9f4a92b9-...": "d1ff29be-..."}

    Key: "9f4a92b9-..."
    Corresponding value:

The template is theirs to the byte. Behind it stands an opener, ` "` by default: small models often know the value and
fail on how an answer begins, so the opener belongs to the question, and what is measured is retrieval. With
`answer_opener=None` nothing stands there and each of `openers` is admitted before the value.

Examples are made by a seeded generator, the same bytes on every platform, or read from lost-in-the-middle's files
(`kv-retrieval-75_keys.jsonl.gz`: lines of ordered_kv_records, key, value). Every example belongs to `search` (40 %) or
`test` (60 %) by a hash of its gold key alone: the two never overlap, whatever the seeds, counts and files. `all` is both.
"""

import gzip
import hashlib
import json
import random
import uuid
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from lpes_jax.errors import UserError
from lpes_jax.tasks.prompts import Prompt, Split
from lpes_jax.tasks.prompts import position as position_of

TEMPLATE = (
    "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    'JSON data:\n{{{records}}}\n\nKey: "{key}"\nCorresponding value:'
)


@dataclass(frozen=True)
class Example:
    """The gold pair and the other pairs in their order."""

    key: str
    value: str
    others: tuple[tuple[str, str], ...]

    @property
    def id(self) -> str:
        content = json.dumps([self.key, self.value, self.others])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class KeyValue:
    """The task `kv`.

    num_pairs: pairs in a prompt; where a file's rows have more, the gold pair and the first others.
    key_length: None for UUIDs (36 characters), or N: keys and values of N lowercase hexadecimal characters.
    data: a .jsonl or .jsonl.gz of lost-in-the-middle; None generates.
    answer_opener: stands at the prompt's end, and the answer is the bare value; None or empty admits `openers` instead.

    Raises UserError for settings that cannot be; `examples` does for a file that cannot be read.
    """

    num_pairs: int
    key_length: int | None = None
    data: Path | None = None
    answer_opener: str | None = ' "'
    openers: tuple[str, ...] = (" ", ' "')

    name: ClassVar[str] = "kv"

    def __post_init__(self):
        if self.num_pairs < 1:
            raise UserError(f"--num-pairs must be at least 1, got {self.num_pairs}")
        if self.key_length is not None:
            if self.data is not None:
                raise UserError("--key-length is for generated pairs; leave it out with --data")
            if self.key_length < 1:
                raise UserError(f"--key-length must be at least 1, got {self.key_length}")
            if 16**self.key_length < self.num_pairs:
                raise UserError(
                    f"--key-length {self.key_length} gives only {16**self.key_length} distinct keys for --num-pairs "
                    f"{self.num_pairs}; use longer keys or fewer pairs"
                )
        if self.data is not None and not self.data.is_file():
            raise UserError(f"--data {self.data}: no such file; leave --data out to generate the pairs")
        if not self.answer_opener and not self.openers:
            raise UserError("without --answer-opener at least one of the admitted --openers is needed")

    @property
    def num_items(self) -> int:
        return self.num_pairs

    @property
    def plain(self) -> "KeyValue | None":
        """The same questions with nothing behind "Corresponding value:"; None where nothing is forced already."""
        return replace(self, answer_opener=None) if self.answer_opener else None

    def examples(self, split: Split, count: int, seed: int) -> list[Example]:
        """The first `count` examples of the split.

        Generated: example i comes from a random stream of its own, so more examples leave the first ones as they were;
        and more pairs leave the gold pair and the first others as they were. From a file: the rows of the split in the
        file's order; nothing is shuffled, `seed` has no effect.
        """
        if count < 0:
            raise UserError(f"--limit must not be negative, got {count}")
        if self.data is None:
            return [self._generate(split, index, seed) for index in range(count)]
        rows = [row for row in self._read(self.data) if split in ("all", split_of(row.key))]
        if len(rows) < count:
            raise UserError(
                f"--data {self.data}: {count} examples asked for, its {split!r} split has {len(rows)}; lower --limit"
            )
        return rows[:count]

    def prompt(self, example: Example, slot: int, position: int | None = None) -> Prompt:
        """The example with its gold pair at `slot`; the other pairs keep their order."""
        own_position = position_of(slot, self.num_pairs)  # refuses a slot that is not there
        records = list(example.others)
        records.insert(slot, (example.key, example.value))
        # Not json.dumps: the original writes the strings as they are, one pair a line.
        lines = ",\n ".join(f'"{key}": "{value}"' for key, value in records)
        text = TEMPLATE.format(records=lines, key=example.key)
        forced = self.answer_opener or ""
        return Prompt(
            text=text + forced,
            answers=(example.value,) if forced else tuple(opener + example.value for opener in self.openers),
            gold=example.value,
            example=example.id,
            position=own_position if position is None else position,
            slot=slot,
            num_items=self.num_pairs,
        )

    def _generate(self, split: Split, index: int, seed: int) -> Example:
        # Seeding with a string goes through SHA-512, and getrandbits is the bare Mersenne Twister: the same everywhere.
        rng = random.Random(f"lpes kv {seed} {split} {index}")
        key, value = self._draw(rng), self._draw(rng)
        while split not in ("all", split_of(key)):
            key = self._draw(rng)
        others: dict[str, str] = {}
        while len(others) < self.num_pairs - 1:
            other, other_value = self._draw(rng), self._draw(rng)
            if other != key and other not in others:
                others[other] = other_value
        return Example(key, value, tuple(others.items()))

    def _draw(self, rng: random.Random) -> str:
        if self.key_length is None:
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return f"{rng.getrandbits(4 * self.key_length):0{self.key_length}x}"

    def _read(self, path: Path) -> list[Example]:
        rows: dict[Example, int] = {}
        number = 0
        try:
            with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.strip():
                        continue
                    row = self._parse(line, f"--data {path}, line {number}")
                    if row in rows:
                        raise UserError(f"--data {path}, line {number}: the same example as line {rows[row]}; remove one")
                    rows[row] = number
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise UserError(f"--data {path}: not readable as .jsonl or .jsonl.gz after line {number} ({error})") from error
        return list(rows)

    def _parse(self, line: str, where: str) -> Example:
        try:
            row = json.loads(line)
            records = [(key, value) for key, value in row["ordered_kv_records"]]
            key, value = row["key"], row["value"]
            if not all(isinstance(text, str) for record in [*records, (key, value)] for text in record):
                raise TypeError("not strings")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{where}: not a lost-in-the-middle row (ordered_kv_records as pairs of strings, key, value)"
            ) from error
        keys = [other for other, _ in records]
        if len(set(keys)) < len(keys):
            repeated = next(other for other in keys if keys.count(other) > 1)
            raise UserError(f"{where}: the key {repeated!r} stands there twice, so the question has no one answer; remove one")
        if (key, value) not in records:
            raise UserError(f"{where}: the pair asked for ({key!r}) is not among ordered_kv_records; add it or remove the line")
        if len(records) < self.num_pairs:
            raise UserError(f"{where}: {len(records)} pairs, but --num-pairs is {self.num_pairs}; use at most {len(records)}")
        records.remove((key, value))
        return Example(key, value, tuple(records[: self.num_pairs - 1]))


def split_of(key: str) -> Split:
    """`search` for 2 in 5 gold keys, `test` for the others: a hash of the key and nothing else."""
    return "search" if int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 5 < 2 else "test"
