"""Many-shot classification: label a text like the one example among many that has its label.

    Label each text. Texts that mean the same have the same label.

    text: My card never came in the mail.
    label: 412

    text: Which currencies can I hold?
    label: 705

    text: I am still waiting for my card.
    label:

`data` is a CSV of text and label, with or without a header, such as banking77's (PolyAI-LDN/task-specific-datasets,
`banking_data/train.csv`, CC BY 4.0). The fact is the only solved example with the right label, at the slot. The others keep
their order and have other labels, each about equally often. So no other part of the prompt reveals the label. With
`labels="numbers"` each label is a random number of three digits, drawn anew for each example, so that labels have no meaning;
`names` keeps the file's own labels. The template is ours.

A hash assigns each text to `search` (40 %) or `test` (60 %); solved examples come from the split of the text asked about.
"""

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.tasks.data import content_id, need_file, split_of, take
from lpes_jax.tasks.metrics import first_line
from lpes_jax.tasks.prompts import Generation, Prompt, Split
from lpes_jax.tasks.prompts import position as position_of
from lpes_jax.text_files import UNREADABLE, open_text

HEADER = ("text", "category", "label")
INSTRUCTION = "Label each text. Texts that mean the same have the same label.\n\n"
SOURCE = "a CSV of text and label, such as banking77's train.csv"
_NUMBERS = range(100, 1000)


@dataclass(frozen=True)
class Example:
    """The text asked about, its label, another text with that label, and (text, label) of the others in their order."""

    text: str
    label: str
    fact: str
    others: tuple[tuple[str, str], ...]

    @property
    def id(self) -> str:
        return content_id(self.text, self.label, self.fact, self.others)


@dataclass(frozen=True)
class ManyShot(Generation):
    """The task `many_shot`.

    Attributes:
        data: See above.
        num_shots: Solved examples, including the fact.
        labels: Random numbers in place of the file's labels, or the file's labels.

    Raises:
        UserError: Invalid settings. From `examples`: the file cannot be read or has too few texts.
    """

    data: Path | None = None
    num_shots: int = 50
    labels: Literal["numbers", "names"] = "numbers"

    name: ClassVar[str] = "many_shot"

    def __post_init__(self):
        check_bounds(self)
        need_file(self.data, SOURCE)
        if self.num_shots < 1:
            raise UserError("--num-shots 0: the fact of --task many_shot is a solved example; use at least 1")

    @property
    def num_items(self) -> int:
        return self.num_shots

    @property
    def max_new_tokens(self) -> int:
        return 16

    @property
    def plain(self) -> None:
        return None

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("exact",)

    def examples(self, split: Split, count: int | None, seed: int) -> list[Example]:
        """The first `count` texts of the split, in the file's order, whose label another text has; `seed` draws the rest."""
        assert self.data is not None
        texts = _read(self.data)
        by_label: dict[Split, dict[str, list[str]]] = {"search": {}, "test": {}}
        for text, label in texts.items():
            by_label[split_of(text)].setdefault(label, []).append(text)
        askable = [text for text, label in texts.items() if len(by_label[split_of(text)][label]) > 1]
        for pool in by_label.values():
            most = sum(map(len, pool.values())) - max(map(len, pool.values()), default=0)
            if len(pool) < 2 or most < self.num_shots - 1:
                raise UserError(
                    f"--num-shots {self.num_shots}: {self.data} has too few texts of other labels ({most}, of "
                    f"{len(pool)} labels in one of the splits); use fewer"
                )
        return [
            self._generate(text, texts[text], by_label[split_of(text)], seed)
            for text in take(askable, split, count, split_of, self.data)
        ]

    def prompt(self, example: Example, slot: int, position: int | None = None) -> Prompt:
        """The example with its fact at `slot`; the others keep their order."""
        own_position = position_of(slot, self.num_items)  # refuses a slot that does not exist
        shots = [*example.others[:slot], (example.fact, example.label), *example.others[slot:]]
        solved = "".join(f"text: {text}\nlabel: {label}\n\n" for text, label in shots)
        return Prompt(
            text=f"{INSTRUCTION}{solved}text: {example.text}\nlabel:",
            answers=(f" {example.label}\n",),
            gold=example.label,
            example=example.id,
            position=own_position if position is None else position,
            slot=slot,
            num_items=self.num_items,
            faults=("answer_in_distractors",) if any(label == example.label for _, label in example.others) else (),
        )

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        """1 if the first line of the output is the label, ignoring case."""
        return {"exact": float(first_line(output).lower() == prompt.gold.strip().lower())}

    def _generate(self, text: str, label: str, pool: dict[str, list[str]], seed: int) -> Example:
        # See key_value.py: string seeds and getrandbits give the same values on every platform.
        rng = random.Random(f"lpes many_shot {seed} {text}")

        def drawn(items: list[str]) -> str:
            return items.pop(rng.getrandbits(32) % len(items))

        fact = drawn([other for other in pool[label] if other != text])
        left = {other: list(texts) for other, texts in pool.items() if other != label}
        others: list[tuple[str, str]] = []
        while len(others) < self.num_shots - 1:
            turn = [other for other, texts in left.items() if texts]
            while turn and len(others) < self.num_shots - 1:
                other = drawn(turn)
                others.append((drawn(left[other]), other))
        named = {}
        if self.labels == "numbers":
            numbers = list(map(str, _NUMBERS))
            for other in sorted({label, *(other for _, other in others)}):
                if not numbers:
                    raise UserError(f"--labels numbers: there are only {len(_NUMBERS)}, fewer than labels; use names")
                named[other] = drawn(numbers)
        return Example(text, named.get(label, label), fact, tuple((shown, named.get(other, other)) for shown, other in others))


def _read(path: Path) -> dict[str, str]:
    """Read texts with their labels; of a repeated text the first. Raises UserError, with the line if one is wrong."""
    texts: dict[str, str] = {}
    try:
        with open_text(path, newline="") as file:
            reader = csv.reader(file)
            for number, cells in enumerate(reader):
                where = f"--data {path}, line {reader.line_num}"
                if not cells or (number == 0 and _is_header(cells)):
                    continue
                if len(cells) != 2:
                    raise UserError(f"{where}: {len(cells)} columns, not {SOURCE}; is a quote missing?")
                text, label = (" ".join(cell.split()) for cell in cells)
                if not text or not label:
                    raise UserError(f"{where}: an empty text or label; remove the line")
                texts.setdefault(text, label)
    except (*UNREADABLE, csv.Error) as error:
        raise UserError(f"--data {path}: not readable as CSV ({error})") from error
    return texts


def _is_header(cells: Sequence[str]) -> bool:
    return len(cells) == 2 and cells[0].strip().lower() in HEADER and cells[1].strip().lower() in HEADER
