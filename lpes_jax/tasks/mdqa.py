"""Multi-document question answering of lost-in-the-middle (Liu et al., 2024): one of n Wikipedia passages has the answer.

    Write a high-quality answer for the given question using only the provided search results (some of which might be
    irrelevant).

    Document [1](Title: List of Nobel laureates in Physics) The first Nobel Prize in Physics was awarded in 1901 to ...
    Document [2](Title: ...) ...

    Question: who got the first nobel prize in physics
    Answer:

The template is theirs byte for byte (the instruction is one line there). The gold document can be at any slot, the others keep
their order, and all are numbered by their order in the prompt. Numbers kept from the file, as in some later code, would reveal
the gold document.

Files are lost-in-the-middle's, .jsonl or .jsonl.gz: question, answers, ctxs (title, text, isgold). With `distractors="random"`,
prompts of any size are made from `nq-open-oracle.jsonl.gz`, which has 2,655 questions with only their gold passages. The
distractors are then gold passages of other questions that contain none of the answers.

A hash of the normalised question assigns it to `search` (7 in 9) or `test` (2 in 9), so the two share no question, for any
files, seeds and counts. Of the 2,655 questions 2,091 are for searching (the paper's Appendix C draws 2,000) and 564 for testing
(the paper measures on 500). Random distractors come from passages of the example's own split.

`queries_per_haystack` > 1, with random distractors, asks several questions about the same documents, which then stay in place.
Each document is gold for one question, and at a position the questions of the nearest documents are asked (so the score at a
position is the mean over these neighbours). All prompts of a haystack, at all positions, are equal up to the question at their
end, and the shared part is computed once. No document answers the question of another one, and none is in two haystacks.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.tasks.data import content_id, json_rows, need_file, split_of, take
from lpes_jax.tasks.metrics import FirstLine, best_subspan_em, contains, f1, first_line, normalise
from lpes_jax.tasks.prompts import Generation, Prompt, Split
from lpes_jax.tasks.prompts import position as position_of

Item = TypeVar("Item")
INSTRUCTION = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant)."
)
RANDOM_ORDER = " The search results are ordered randomly."
SOURCE = "the files are in nelson-liu/lost-in-the-middle, qa_data/"
ROW = "a lost-in-the-middle row (question, answers, ctxs with title, text and isgold, one of them gold)"


@dataclass(frozen=True)
class Document:
    """A passage. `id` is the file's own id, or the 0-based row whose gold document it is."""

    title: str
    text: str
    id: str | None = None


@dataclass(frozen=True)
class Example:
    """A question, its gold answers, its gold document, and the other documents in their order."""

    question: str
    answers: tuple[str, ...]
    gold: Document
    distractors: tuple[Document, ...]

    @property
    def id(self) -> str:
        documents = [(document.title, document.text) for document in (self.gold, *self.distractors)]
        return content_id(self.question, self.answers, documents)


@dataclass(frozen=True)
class Question:
    """One of several questions about documents that keep their order, each of which is gold for a question."""

    haystack: tuple[Example, ...]
    number: int

    @property
    def id(self) -> str:
        return content_id(*(example.id for example in self.haystack), self.number)

    def slot(self, slot: int) -> int:
        """The slot of the document asked for: the nearest to `slot` for question 0, the next for 1, ..."""
        return sorted(range(len(self.haystack)), key=lambda other: abs(other - slot))[self.number]


@dataclass(frozen=True)
class MultiDocumentQA(Generation):
    """The task `mdqa`.

    Attributes:
        data: A .jsonl or .jsonl.gz of lost-in-the-middle.
        num_documents: Documents in a prompt. If a file's rows have more, the gold document and the first others are used.
        distractors: `file`: those of the row. `random`: other questions' gold documents that contain no answer.
        mode: `documents`; `oracle`: only the gold document; `closed_book`: only the question.
        query_aware: Whether the question also comes before the documents.
        random_order: Whether the distractors are shuffled and the instruction says so.
        first_line: `stripped`: the first line after leading white space is scored; `original`: the first line, even if empty;
            `all`: the whole output.
        empty_golds_match: Whether an answer that normalises to nothing counts as found, as in the original.
        unicode_normalise: Whether scoring ignores accents and punctuation outside ASCII.
        queries_per_haystack: The number of consecutive examples that ask about the same documents (see above).

    Raises:
        UserError: Invalid settings. From `examples`: the file cannot be read.
    """

    data: Path | None = None
    num_documents: int = 10
    distractors: Literal["file", "random"] = "file"
    mode: Literal["documents", "oracle", "closed_book"] = "documents"
    query_aware: bool = False
    random_order: bool = False
    first_line: FirstLine = "stripped"
    empty_golds_match: bool = False
    unicode_normalise: bool = False
    queries_per_haystack: int = 1

    name: ClassVar[str] = "mdqa"

    def __post_init__(self):
        check_bounds(self)
        need_file(self.data, SOURCE)
        if self.query_aware and self.random_order:
            raise UserError("--query-aware and --random-order: lost-in-the-middle has no prompt with both; remove one")
        if not 1 <= self.queries_per_haystack <= max(1, self.num_documents - 1):
            raise UserError(
                f"--queries-per-haystack {self.queries_per_haystack}: must be from 1 to one below --num-documents "
                f"({self.num_documents}); otherwise every position would ask about all documents"
            )
        if self.queries_per_haystack > 1 and (self.distractors, self.mode, self.random_order) != ("random", "documents", False):
            raise UserError(
                "--queries-per-haystack above 1 needs --distractors random (each document is gold for a question), without "
                "--mode and --random-order"
            )

    @property
    def num_items(self) -> int:
        return self.num_documents if self.mode == "documents" else 1

    @property
    def plain(self) -> None:
        return None

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("best_subspan_em", "best_subspan_em_bounded", "best_subspan_em_original", "f1")

    def examples(self, split: Split, count: int | None, seed: int) -> list[Any]:
        """The first `count` questions of the split, in the file's order; `seed` only draws or shuffles distractors.

        They are `Example`s, or `Question`s if a haystack has several; then `seed` draws the haystacks and their order.
        """
        assert self.data is not None
        rows = self._read(self.data)
        if self.queries_per_haystack > 1:
            haystacks = self._haystacks(rows, split, seed)
            asked = [Question(haystack, number) for haystack in haystacks for number in range(self.queries_per_haystack)]
            return take(asked, split, count, lambda question: question_split(question.haystack[0].question), self.data)
        chosen = take(rows, split, count, lambda row: question_split(row.question), self.data)
        if self.mode != "documents":
            return [Example(row.question, row.answers, row.gold, ()) for row in chosen]
        if self.distractors == "random":
            draw = self._random_distractors(rows, seed)
            chosen = [Example(row.question, row.answers, row.gold, draw(row)) for row in chosen]
        if self.random_order:
            chosen = [Example(row.question, row.answers, row.gold, _shuffled(row, seed)) for row in chosen]
        return chosen

    def prompt(self, example: Example | Question, slot: int, position: int | None = None) -> Prompt:
        """The example with its gold document at `slot`, the others in order, all numbered in the order of the prompt.

        For a `Question`: the question about the document nearest to the slot.
        """
        own_position, identity = position_of(slot, self.num_items), example.id  # refuses a slot that does not exist
        if isinstance(example, Question):
            slot, documents = example.slot(slot), [row.gold for row in example.haystack]
            example = replace(example.haystack[slot], distractors=(*documents[:slot], *documents[slot + 1 :]))
        else:
            documents = [*example.distractors[:slot], example.gold, *example.distractors[slot:]]
        question = f"Question: {example.question}"
        lines = "\n".join(
            f"Document [{number}](Title: {document.title}) {document.text}" for number, document in enumerate(documents, 1)
        )
        instruction = INSTRUCTION + (RANDOM_ORDER if self.random_order else "")
        parts = [instruction, *([question] if self.query_aware else []), lines, f"{question}\nAnswer:"]
        return Prompt(
            text=parts[-1] if self.mode == "closed_book" else "\n\n".join(parts),
            answers=tuple(dict.fromkeys(f" {answer}" for answer in example.answers if answer.strip())),
            gold=example.answers[0],
            example=identity,
            position=own_position if position is None else position,
            slot=slot,
            num_items=self.num_items,
            golds=example.answers,
            details={"distractors": [document.id for document in example.distractors]},
            faults=self._faults(example),
        )

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        """Substring match of the first line by these settings, the same for whole words, lost-in-the-middle's own, and F1.

        SQuAD's F1 of the first line is that of the best gold; it falls if an output says more than was asked.
        """
        golds, own = prompt.references, {"rule": self.first_line, "empty_golds_match": self.empty_golds_match}
        original = best_subspan_em(output, golds, rule="original", empty_golds_match=True)
        return {
            "best_subspan_em": float(best_subspan_em(output, golds, **own, unicode=self.unicode_normalise)),
            "best_subspan_em_bounded": float(
                best_subspan_em(output, golds, **own, unicode=self.unicode_normalise, bounded=True)
            ),
            "best_subspan_em_original": float(original),
            "f1": f1(first_line(output, self.first_line), golds, unicode=self.unicode_normalise),
        }

    def _faults(self, example: Example) -> tuple[str, ...]:
        """`gold_empty` if one of the answers is empty; the original's metric then counts every output as right."""
        scored = {normalise(answer, unicode) for answer in example.answers for unicode in {False, self.unicode_normalise}}
        leaks = self.mode == "documents" and any(_answers(_text(other), example.answers) for other in example.distractors)
        return ("gold_empty",) * ("" in scored) + ("answer_in_distractors",) * leaks

    def _read(self, path: Path) -> list[Example]:
        examples: dict[str, Example] = {}
        wanted = self.num_documents - 1 if self.mode == "documents" and self.distractors == "file" else 0
        for number, (where, row) in enumerate(json_rows(path, ("question", "answers", "ctxs"), ROW)):
            example = _parse(row, number, where)
            if len(example.distractors) < wanted:
                raise UserError(
                    f"{where}: {len(example.distractors) + 1} documents, but --num-documents is {self.num_documents}; "
                    f"use at most {len(example.distractors) + 1}, or --distractors random"
                )
            key = normalise(example.question)
            if key in examples:
                raise UserError(f"{where}: the question {example.question!r} is in an earlier line too; remove one")
            examples[key] = Example(example.question, example.answers, example.gold, example.distractors[:wanted])
        return list(examples.values())

    def _haystacks(self, rows: list[Example], split: Split, seed: int) -> list[tuple[Example, ...]]:
        """The haystacks of both splits, shuffled. Raises UserError if the split asked for has none."""
        found = []
        for pool_split, pool in _pools(rows).items():
            left = _drawn(list(pool.values()), f"lpes mdqa haystacks {seed} {pool_split}")
            haystack: list[tuple[Example, str]] = []
            while len(haystack) + len(left) >= self.num_documents:
                fitting = (index for index, row in enumerate(left) if all(_apart(row, other) for other in haystack))
                if (index := next(fitting, None)) is None:  # no row fits all of these: continue without the first
                    left, haystack = haystack[1:] + left, []
                    continue
                haystack.append(left.pop(index))
                if len(haystack) == self.num_documents:
                    found.append(tuple(row for row, _ in haystack))
                    haystack = []
        if not any(split in ("all", question_split(haystack[0].question)) for haystack in found):
            raise UserError(
                f"--num-documents {self.num_documents}: the passages of the {split!r} split of {self.data} form no haystack "
                "in which none answers the question of another; use fewer documents"
            )
        return _drawn(found, f"lpes mdqa order of haystacks {seed}")

    def _random_distractors(self, rows: list[Example], seed: int) -> Callable[[Example], tuple[Document, ...]]:
        pools = _pools(rows)

        def draw(row: Example) -> tuple[Document, ...]:
            split = question_split(row.question)
            rng = random.Random(f"lpes mdqa {seed} {normalise(row.question)}")
            left, found = list(pools[split].values()), []
            while len(found) < self.num_documents - 1:
                if not left:
                    raise UserError(
                        f"--num-documents {self.num_documents}: only {len(found)} other passages of the {split!r} split of "
                        f"{self.data} have no answer to {row.question!r}; use fewer documents"
                    )
                other, text = left.pop(rng.getrandbits(32) % len(left))
                if other.gold.text != row.gold.text and not _answers(text, row.answers):
                    found.append(other.gold)
            return tuple(found)

        return draw


def question_split(question: str) -> Split:
    """`search` for 7 in 9 questions, `test` for the others, by a hash."""
    return split_of(normalise(question), search=7, of=9)


def _pools(rows: list[Example]) -> dict[Split, dict[str, tuple[Example, str]]]:
    """The passages of each split, by text: the first row that has the passage as gold, and the passage normalised."""
    pools: dict[Split, dict[str, tuple[Example, str]]] = {"search": {}, "test": {}}
    for row in rows:  # a passage may be gold for several questions, but is in a prompt once
        pools[question_split(row.question)].setdefault(row.gold.text, (row, _text(row.gold)))
    for shared in pools["search"].keys() & pools["test"].keys():  # gold for questions of both splits: used by neither
        del pools["search"][shared], pools["test"][shared]
    return pools


@lru_cache(2**16)  # a passage is in many prompts
def _text(document: Document) -> str:
    """The normalised passage, for comparison with answers."""
    return normalise(f"{document.title} {document.text}")


def _apart(one: tuple[Example, str], other: tuple[Example, str]) -> bool:
    """Whether neither passage answers the question of the other."""
    return not (_answers(one[1], other[0].answers) or _answers(other[1], one[0].answers))


def _answers(text: str, answers: tuple[str, ...]) -> bool:
    # Answers of one or two characters ("5", "S") are inside almost any passage; they count as whole words only.
    golds = [normalise(answer) for answer in answers]
    return any(contains(text, gold, bounded=len(gold) < 3) for gold in golds if gold)


def _shuffled(row: Example, seed: int) -> tuple[Document, ...]:
    return tuple(_drawn(row.distractors, f"lpes mdqa order {seed} {normalise(row.question)}"))


def _drawn(items: Sequence[Item], seed: str) -> list[Item]:
    """The items in a random order, identical on every platform."""
    rng, left = random.Random(seed), list(items)
    return [left.pop(rng.getrandbits(32) % len(left)) for _ in items]


def _parse(row: dict[str, Any], number: int, where: str) -> Example:
    try:
        question, answers = row["question"], tuple(row["answers"])
        documents = [(bool(ctx["isgold"]), ctx["title"], ctx["text"], ctx.get("id")) for ctx in row["ctxs"]]
        texts = [question, *answers, *(text for _, *texts in documents for text in texts[:2])]
        strings = isinstance(row["answers"], list) and all(isinstance(text, str) for text in texts)
        if not strings or not answers or sum(is_gold for is_gold, *_ in documents) != 1:
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{where}: not {ROW}") from error
    [gold] = [Document(title, text, str(number)) for is_gold, title, text, _ in documents if is_gold]
    others = [Document(title, text, None if id is None else str(id)) for is_gold, title, text, id in documents if not is_gold]
    return Example(question, answers, gold, tuple(others))
