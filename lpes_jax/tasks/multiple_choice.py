"""MMLU (Hendrycks et al., 2021) and C-Eval (Huang et al., 2023): k-shot questions, decided by the likeliest option letter.

    The following are multiple choice questions (with answers) about  world religions.

    What is the Second Gem in Buddhism?
    A. The Dharma
    ...
    Answer: A

    What can murtis be translated as?
    A. Offerings
    ...
    Answer:

The double space is the benchmark's. `data` is a folder with dev/SUBJECT_dev.csv for the shots, and test/SUBJECT_test.csv (MMLU)
or val/SUBJECT_val.csv (C-Eval, whose test labels are hidden) for the questions. Files may have a header row (question, four
choices, answer) or none; answers are letters or 0 to 3. If `data` contains C-Eval's subject_mapping.json, prompts use its
Chinese names. A prompt that is too long loses its last shots, as in MMLU's own code.

A hash of its text assigns a question to `search` (40 %) or `test` (60 %); `all` is every row. Accuracy over all questions is
MMLU's own average; `details["subject"]` allows other averages.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from lpes_jax.errors import UserError
from lpes_jax.json_files import read_json
from lpes_jax.limits import check_bounds
from lpes_jax.tasks.data import content_id, split_of, take
from lpes_jax.tasks.prompts import Cut, Prompt, Split, Unmoved, check_once
from lpes_jax.tasks.prompts import position as position_of
from lpes_jax.text_files import UNREADABLE, open_text

LETTERS = "ABCD"
SOURCE = {
    "mmlu": "the files are those of hendrycks/test",
    "ceval": "the files are those of hkust-nlp/ceval",
}
HEADERS = {
    "mmlu": "The following are multiple choice questions (with answers) about  {subject}.\n\n",
    "ceval": "以下是中国关于{subject}考试的单项选择题，请选出其中的正确答案。\n\n",
}
ANSWER = {"mmlu": "\nAnswer:", "ceval": "\n答案："}
OPENER = {"mmlu": " ", "ceval": ""}
COLUMNS = {  # of files without a header, by their number of columns
    6: ("question", *LETTERS, "answer"),
    7: ("id", "question", *LETTERS, "answer"),
    8: ("id", "question", *LETTERS, "answer", "explanation"),
}


@dataclass(frozen=True)
class CsvRow:
    """A line of a CSV."""

    question: str
    choices: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Example:
    """A question with its subject and its shots."""

    subject: str
    row: CsvRow
    shots: tuple[CsvRow, ...]


@dataclass(frozen=True)
class MultipleChoice(Unmoved):
    """The tasks `mmlu` and `ceval`.

    Attributes:
        benchmark: Which of the two.
        data: See above.
        subjects: Subjects by their file names; empty means all.
        num_shots: Solved questions of the dev file before the question.
    """

    benchmark: Literal["mmlu", "ceval"] = "mmlu"
    data: Path | None = None
    subjects: tuple[str, ...] = ()
    num_shots: int = 5

    name: ClassVar[str]

    def __post_init__(self):
        object.__setattr__(self, "name", self.benchmark)
        check_bounds(self)
        if self.data is None:
            raise UserError(f"--data is needed: a folder with dev/ and {self._part}/; {SOURCE[self.benchmark]}")
        if not (self.data / self._part).is_dir():
            raise UserError(f"--data {self.data}: no folder {self._part}/ in it; {SOURCE[self.benchmark]}")
        check_once(self.subjects, "--subjects")
        known = self._known(self.data)
        unknown = [subject for subject in self.subjects if subject not in known]
        if unknown or not known:
            raise UserError(
                f"--subjects: {self.data / self._part} has no {unknown[0] if unknown else '*'}_{self._part}.csv; "
                f"its subjects are: {', '.join(known) or 'none'}"
            )

    @property
    def _part(self) -> str:
        return "test" if self.benchmark == "mmlu" else "val"

    def _known(self, data: Path) -> list[str]:
        return sorted(file.name.removesuffix(f"_{self._part}.csv") for file in (data / self._part).glob(f"*_{self._part}.csv"))

    @property
    def decided_by(self) -> Literal["options"]:
        return "options"

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("acc",)

    @property
    def max_new_tokens(self) -> int:
        return 1

    @property
    def max_prompt_tokens(self) -> int | None:
        return None

    @property
    def stop(self) -> tuple[str, ...]:
        return ()

    def examples(self, split: Split, count: int | None, seed: int) -> list[Example]:
        """The first `count` questions of the split, by subject and in the files' order; `seed` has no effect."""
        assert self.data is not None
        examples = []
        names = _chinese_names(self.data / "subject_mapping.json") if self.benchmark == "ceval" else {}
        for subject in self.subjects or self._known(self.data):
            shots: list[CsvRow] = []
            if self.num_shots:
                dev = self.data / "dev" / f"{subject}_dev.csv"
                shots = read_csv(dev)
                if len(shots) < self.num_shots:
                    raise UserError(f"--num-shots {self.num_shots}: {dev} has {len(shots)} rows")
            for row in read_csv(self.data / self._part / f"{subject}_{self._part}.csv"):
                examples.append(Example(names.get(subject, subject), row, tuple(shots[: self.num_shots])))
        return take(examples, split, count, lambda example: split_of(example.row.question), self.data)

    def prompt(self, example: Example, slot: int, position: int | None = None) -> Prompt:
        """The benchmark's prompt, with the option letters as options; there is only slot 0."""
        own_position = position_of(slot, 1)
        subject = example.subject.replace("_", " ") if self.benchmark == "mmlu" else example.subject
        text = HEADERS[self.benchmark].format(subject=subject)
        ends = [len(text)]
        for shot in example.shots:
            text += f"{self._question(shot)}{OPENER[self.benchmark]}{shot.answer}\n\n"
            ends.append(len(text))
        options = tuple(OPENER[self.benchmark] + letter for letter in LETTERS)
        return Prompt(
            text=text + self._question(example.row),
            answers=(options[LETTERS.index(example.row.answer)],),
            gold=example.row.answer,
            example=content_id(example.subject, example.row.question, example.row.choices, example.row.answer),
            position=own_position if position is None else position,
            slot=slot,
            num_items=1,
            options=options,
            cut=Cut(ends[0], ends[-1], ends=tuple(ends)),
            details={"subject": example.subject},
            faults=_faults(example.row),
        )

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        """1 if the likeliest option is the right letter."""
        return {"acc": float(output.strip() == prompt.gold)}

    def _question(self, row: CsvRow) -> str:
        choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, row.choices, strict=True))
        return row.question + choices + ANSWER[self.benchmark]


def _faults(row: CsvRow) -> tuple[str, ...]:
    choices = [choice.strip() for choice in row.choices]
    right = choices[LETTERS.index(row.answer)]
    return ("gold_empty",) * (not right) + ("answer_in_distractors",) * (choices.count(right) > 1)


def read_csv(path: Path) -> list[CsvRow]:
    """Read a file of either benchmark, with or without a header. Raises UserError, with the line if one is wrong."""
    if not path.is_file():
        raise UserError(f"--data: {path} is missing")
    rows: list[CsvRow] = []
    columns: Sequence[str] | None = None
    try:
        with open_text(path, newline="") as file:
            reader = csv.reader(file)
            for cells in reader:
                where = f"--data {path}, line {reader.line_num}"
                if columns is None:
                    columns = _columns(cells, where)
                    if "question" in cells:
                        continue
                if cells:
                    rows.append(_row(cells, columns, where))
    except (*UNREADABLE, csv.Error) as error:
        raise UserError(f"--data {path}: not readable as CSV ({error})") from error
    return rows


def _columns(cells: list[str], where: str) -> Sequence[str]:
    if "question" not in cells:
        if len(cells) not in COLUMNS:
            raise UserError(
                f"{where}: {len(cells)} columns; a file without a header has 6 (question, A, B, C, D, answer), 7 or 8"
            )
        return COLUMNS[len(cells)]
    named = [f"{LETTERS[int(cell[-1])]}" if cell in ("choice0", "choice1", "choice2", "choice3") else cell for cell in cells]
    missing = [column for column in COLUMNS[6] if column not in named]
    if missing:
        hint = "; C-Eval's test files have none, use val/" if missing == ["answer"] else ""
        raise UserError(f"{where}: the header lacks {', '.join(missing)}{hint}")
    return named


def _row(cells: list[str], columns: Sequence[str], where: str) -> CsvRow:
    if len(cells) != len(columns):
        raise UserError(f"{where}: {len(cells)} columns, but {len(columns)} above; is a quote missing?")
    row = dict(zip(columns, cells, strict=True))
    answer = row["answer"].strip()
    answer = LETTERS[int(answer)] if answer in ("0", "1", "2", "3") else answer
    if answer not in tuple(LETTERS):
        raise UserError(f"{where}: the answer {row['answer']!r} is none of A, B, C, D and 0, 1, 2, 3")
    return CsvRow(row["question"], tuple(row[letter] for letter in LETTERS), answer)


def _chinese_names(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    wrong = "is not C-Eval's (subject: [English, Chinese, category]); remove it"
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"--data: {path} {wrong}")
    if not all(isinstance(names, list) and len(names) > 1 and isinstance(names[1], str) for names in found.values()):
        raise UserError(f"--data: {path} {wrong}")
    return {subject: names[1] for subject, names in found.items()}
