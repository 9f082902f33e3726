"""ZeroSCROLLS (Shaham et al., 2023): summaries, questions and sorting over long documents, zero-shot.

Files are the benchmark's own, .jsonl. A line contains the whole prompt (`input`), the indices of its document and query, one
reference (`output`) and an `id`. Lines with the same id are references of one question, and the best of them counts. Only the
validation splits have references (20 to 80 lines per task). A prompt that is too long loses the end of its document, which the
benchmark's `truncation_seperator` replaces; the query after it is never cut. The limits are the paper's: 3,584 tokens of
prompt, 512 to generate (upstream 1,024).

`qmsum` also reads the files of Yale-LILY/QMSum (meeting_transcripts and queries) and writes the same kind of prompt.

A hash assigns documents, with all their questions, to `search` (40 %) or `test` (60 %); `all` is the whole split.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.tasks.data import content_id, json_rows, need_file, split_of, take
from lpes_jax.tasks.metrics import ROUGE, choice, concordance, exponential_similarity, f1, percentage, rouge, says_nothing
from lpes_jax.tasks.prompts import Cut, Generated, Prompt, Split, Unmoved, continuation
from lpes_jax.tasks.prompts import position as position_of

METRICS = {
    "gov_report": "rouge",
    "summ_screen_fd": "rouge",
    "qmsum": "rouge",
    "squality": "rouge",
    "qasper": "f1",
    "narrative_qa": "f1",
    "quality": "accuracy",
    "space_digest": "exponential_similarity",
    "book_sum_sort": "concordance",
}
COLUMNS = ("id", "input", "output", "document_start_index", "query_start_index", "truncation_seperator")
SOURCE = "the validation files are in tau/zero_scrolls (a .zip for each task)"
QMSUM = (
    "You are given a meeting transcript and a query containing a question or instruction. "
    "Answer the query in one or more sentences.\n\nTranscript:\n{transcript}\n\nQuery:\n{query}\n\nAnswer:\n"
)


@dataclass(frozen=True)
class Example:
    """One prompt with its references; `cut` says where it may be shortened."""

    id: str
    text: str
    references: tuple[str, ...]
    cut: Cut

    @property
    def document(self) -> str:
        return self.text[self.cut.start : self.cut.end].strip()


@dataclass(frozen=True)
class ZeroScrolls(Unmoved, Generated):
    """The task `zero_scrolls`: one of `METRICS`, from its validation file. Raises UserError for invalid settings."""

    subset: str = "gov_report"
    data: Path | None = None
    max_prompt_tokens: int | None = 3584
    max_new_tokens: int = 512

    name: ClassVar[str] = "zero_scrolls"

    def __post_init__(self):
        check_bounds(self)
        if self.subset not in METRICS:
            raise UserError(f"--subset {self.subset!r} is not in ZeroSCROLLS; its supported tasks are: {', '.join(METRICS)}")
        need_file(self.data, SOURCE)

    @property
    def metrics(self) -> tuple[str, ...]:
        """For summaries, the means of the last three give the benchmark's own score: `metrics.corpus_rouge`."""
        metric = METRICS[self.subset]
        return ("rouge", *ROUGE) if metric == "rouge" else (metric,)

    def examples(self, split: Split, count: int | None, seed: int) -> list[Example]:
        """The first `count` questions of the split, in the file's order; `seed` has no effect."""
        assert self.data is not None
        return take(self._read(self.data), split, count, lambda example: split_of(example.document), self.data)

    def prompt(self, example: Example, slot: int, position: int | None = None) -> Prompt:
        """The example's own prompt; there is only slot 0."""
        own_position = position_of(slot, 1)
        metric = METRICS[self.subset]
        answers = () if metric == "rouge" else [answer for answer in example.references if answer.strip()]
        empty = metric in ("rouge", "f1") and all(says_nothing(answer, metric) for answer in example.references)
        return Prompt(
            text=example.text,
            answers=tuple(dict.fromkeys(continuation(example.text, answer) for answer in answers)),
            gold=example.references[0],
            example=content_id(example.id, example.text),
            position=own_position if position is None else position,
            slot=slot,
            num_items=1,
            golds=example.references,
            cut=example.cut,
            details={"id": example.id, "subset": self.subset},
            faults=("gold_empty",) * empty,
        )

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        """The benchmark's metric of this subset, by the best reference."""
        match METRICS[self.subset]:
            case "rouge":
                return rouge(output, prompt.references)
            case "f1":
                return {"f1": f1(output, prompt.references)}
            case "accuracy":
                return {"accuracy": float(choice(output) in [choice(gold) for gold in prompt.references])}
            case "exponential_similarity":
                return {"exponential_similarity": max(exponential_similarity(output, gold) for gold in prompt.references)}
            case _:
                return {"concordance": max(concordance(output, gold) for gold in prompt.references)}

    def _read(self, path: Path) -> list[Example]:
        examples: dict[str, Example] = {}
        columns = () if self.subset == "qmsum" else COLUMNS
        for where, row in json_rows(path, columns, f"a ZeroSCROLLS row ({', '.join(COLUMNS)})"):
            raw = self.subset == "qmsum" and "meeting_transcripts" in row
            for example in _meeting(row, where) if raw else [self._parse(row, where)]:
                known = examples.get(example.id)
                if known is not None and known.text != example.text:
                    raise UserError(f"{where}: the id {example.id!r} is used in an earlier line with another input; rename one")
                references = (*known.references, *example.references) if known else example.references
                examples[example.id] = Example(example.id, example.text, references, example.cut)
        return list(examples.values())

    def _parse(self, row: dict[str, Any], where: str) -> Example:
        try:
            id, text, output, start, end, separator = (row[column] for column in COLUMNS)
            if not all(isinstance(text, str) for text in (id, text, output, separator)):
                raise TypeError("not strings")
            if not all(type(index) is int for index in (start, end)):
                raise TypeError("not indices")
            if not 0 <= start <= end <= len(text):
                raise ValueError("indices outside of input")
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{where}: not a ZeroSCROLLS row with references ({', '.join(COLUMNS)}); its test split has none"
            ) from error
        metric = METRICS[self.subset]
        if metric == "accuracy" and choice(output) is None:
            raise UserError(f"{where}: the output {output!r} names no letter from A to D; is this a file of {self.subset}?")
        share = percentage(output)
        if metric == "exponential_similarity" and (share is None or not math.isfinite(share)):
            raise UserError(f"{where}: the output {output!r} is not a percentage; is this a file of {self.subset}?")
        if metric == "concordance" and not re.search(r"\d", output):
            raise UserError(f"{where}: the output {output!r} has no numbers to sort; is this a file of {self.subset}?")
        return Example(id, text, (output,), Cut(start, end, separator))


def _meeting(row: dict[str, Any], where: str) -> Iterator[Example]:
    try:
        turns = [f"{turn['speaker']}: {turn['content']}" for turn in row["meeting_transcripts"]]
        queries = [(query["query"], query["answer"]) for query in (*row["general_query_list"], *row["specific_query_list"])]
        if not all(isinstance(text, str) for query in queries for text in query):
            raise TypeError("not strings")
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{where}: not a QMSum meeting (meeting_transcripts, general_query_list, specific_query_list)"
        ) from error
    transcript = "\n".join(turns)
    start, end = QMSUM.index("{transcript}"), QMSUM.index("{transcript}") + len(transcript) + len("\n\n")
    cut = Cut(start, end, "... [The rest of the transcript is omitted]\n\n")
    for query, answer in queries:
        text = QMSUM.format(transcript=transcript, query=query)
        yield Example(content_id(text), text, (answer,), cut)
