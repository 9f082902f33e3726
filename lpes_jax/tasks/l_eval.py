"""L-Eval (An et al., 2023): questions about long documents, closed-ended (letters, True or False) and open-ended.

Files are the benchmark's own, .jsonl, one per subset. A line has a document (`input`), its instructions and outputs, and the
metric (`evaluation`). Closed-ended: coursera (several letters may be right; some of them without a wrong one score a quarter),
quality and tpo (one letter), sci_fi. In sci_fi each instruction is asked twice, about the document (`loyalty`) and, without it,
about the real world (`fact`); the score is the mean of both. Open-ended: rows measured by F1 or ROUGE; rows that people or a
large model should judge are skipped.

The plain prompt is the benchmark's prompt for Llama-2 without its chat brackets; `form` selects Llama-2's or Vicuna's, byte for
byte. A document that is too long loses its end. Upstream removes 250 words at a time and fits only the document; here the
longest part is kept that fits with the rest of the prompt. The limits are the paper's, 3,584 tokens of prompt and 512 to
generate; its Table 17 has 15,872 + 512.

A hash assigns documents, with all their questions, to `search` (40 %) or `test` (60 %); `all` is the whole file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.tasks.data import content_id, json_rows, need_file, split_of, take
from lpes_jax.tasks.metrics import ROUGE, exam_letters, exam_score, f1, rouge, says_nothing
from lpes_jax.tasks.prompts import Cut, Generated, Prompt, Split, Unmoved, continuation
from lpes_jax.tasks.prompts import position as position_of

F1_SUBSETS = ("financial_qa", "legal_contract_qa", "multidoc_qa", "narrative_qa", "natural_question", "scientific_qa")
ROUGE_SUBSETS = (
    "gov_report_summ",
    "meeting_summ",
    "news_summ",
    "paper_assistant",
    "patent_summ",
    "review_summ",
    "tv_show_summ",
)
LETTER_SUBSETS = ("coursera", "quality", "tpo")
SUBSETS = (*LETTER_SUBSETS, "sci_fi", *F1_SUBSETS, *ROUGE_SUBSETS)
COLUMNS = ("instructions", "outputs", "input", "evaluation")
SOURCE = "the files are in OpenLMLab/LEval, LEval-data/"

_LONG = "Now you are given a very long document. Please follow the instruction "
_MULTI = _LONG + "based on this document. For multi-choice questions, there "
SYSTEM = {  # the misspelling "sinlge" is the benchmark's
    "coursera": _MULTI + "could be a sinlge correct option or multiple correct options. Please only provide the letter "
    "corresponding to the answer (like A or AB) when answering. ",
    "sci_fi": "Now you are given a scientific fiction. I will ask you some questions and the answer should be "
    '"True" or "False". Notice that you should answer the question based on the evidence in the document instead of your '
    "background knowledge.",
    "exam": _MULTI
    + "is only a sinlge correct option. Please only provide the letter corresponding to the answer (like A or B) "
    "when answering. For other questions, please directly give the concise and accurate answer. ",
    "open": _LONG + "after this document. These instructions may include summarizing a document, answering questions based on "
    "the document, or writing a required paragraph. ",
}
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant."
    "The assistant gives helpful, detailed, and polite answers to the user's questions. USER: "
)
_EXAM = "{document} \nQuestion: {question}.  Please directly give the answer without any additional output or explanation "
_OPEN = "{document} Instruction: {question} \nAnswer this question with {words} words."
TEMPLATES = {
    ("plain", "exam"): "{system}Document is as follows. " + _EXAM + "\nAnswer:",
    ("plain", "open"): "{system}Document is as follows. " + _OPEN,
    ("llama2", "exam"): "[INST]<<SYS>>\n{system}\n<</SYS>>\n\nDocument is as follows. " + _EXAM + "[/INST]\nAnswer:",
    ("llama2", "open"): "[INST]<<SYS>>\n{system}\n<</SYS>>\n\nDocument is as follows. " + _OPEN + "[/INST]",
    ("vicuna", "exam"): _VICUNA + "{system}Document is as follows. {document} \nQuestion: {question}  \nAnswer:",
    ("vicuna", "open"): _VICUNA + "{system}Document is as follows. {document} \nInstruction: {question} The suggested output "
    "length is around {words} words.  \nASSISTANT: My english answer is:",
}
FACT = {
    "plain": "{question}Please directly answer without any additional output or explanation. \nAnswer:",
    "llama2": "{question}Please directly answer without any additional output or explanation. \nAnswer:",
    "vicuna": "{question}\nAnswer:",
}
_WORLDS = (
    "based on the world described in the document.",
    "based on the real-world knowledge and facts up until your last training",
)


@dataclass(frozen=True)
class Example:
    """A question about a document, the right output and its number of words, and for sci_fi its kind."""

    document: str
    question: str
    gold: str
    words: int
    kind: Literal["loyalty", "fact"] | None = None


@dataclass(frozen=True)
class LEval(Unmoved, Generated):
    """The task `l_eval`: one of `SUBSETS`, from its file. Raises UserError for invalid settings."""

    subset: str = "coursera"
    data: Path | None = None
    form: Literal["plain", "llama2", "vicuna"] = "plain"
    max_prompt_tokens: int | None = 3584
    max_new_tokens: int = 512

    name: ClassVar[str] = "l_eval"

    def __post_init__(self):
        check_bounds(self)
        if self.subset not in SUBSETS:
            raise UserError(f"--subset {self.subset!r} is not in L-Eval; its supported tasks are: {', '.join(SUBSETS)}")
        need_file(self.data, SOURCE)

    @property
    def metrics(self) -> tuple[str, ...]:
        """`exam` is the benchmark's; `exact` has no quarters and no guessed letters. For ROUGE see `metrics.corpus_rouge`."""
        if self.subset in F1_SUBSETS:
            return ("f1",)
        return ("rouge", *ROUGE) if self.subset in ROUGE_SUBSETS else ("exam", "exact")

    def examples(self, split: Split, count: int | None, seed: int) -> list[Example]:
        """The first `count` questions of the split, in the file's order; `seed` has no effect."""
        assert self.data is not None
        return take(list(self._read(self.data)), split, count, lambda example: split_of(example.document), self.data)

    def prompt(self, example: Example, slot: int, position: int | None = None) -> Prompt:
        """The benchmark's prompt; there is only slot 0."""
        own_position = position_of(slot, 1)
        kind = "open" if self.subset in (*F1_SUBSETS, *ROUGE_SUBSETS) else "exam"
        system = SYSTEM.get(self.subset, SYSTEM[kind])
        cut = None
        if example.kind == "fact":
            text = FACT[self.form].format(question=example.question)
        else:
            template = TEMPLATES[self.form, kind]
            text = template.format(system=system, document=example.document, question=example.question, words=example.words)
            start = len(template.partition("{document}")[0].format(system=system))
            cut = Cut(start, start + len(example.document))
        return Prompt(
            text=text,
            answers=() if self.subset in ROUGE_SUBSETS or not example.gold.strip() else (continuation(text, example.gold),),
            gold=example.gold,
            example=content_id(example.document, example.question, example.gold, example.kind),
            position=own_position if position is None else position,
            slot=slot,
            num_items=1,
            cut=cut,
            details={"subset": self.subset} | ({"kind": example.kind} if example.kind else {}),
            faults=("gold_empty",) * (kind == "open" and says_nothing(example.gold, self.metrics[0])),
        )

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        """The benchmark's metric of this subset."""
        if self.subset in F1_SUBSETS:
            return {"f1": f1(output, prompt.references)}
        if self.subset in ROUGE_SUBSETS:
            return rouge(output, prompt.references)
        if self.subset == "sci_fi":
            right = float(_judgement(output) == prompt.gold.lower())
            return {"exam": right, "exact": right}
        said = exam_letters(output, several=self.subset == "coursera")
        guessed = not re.search("[A-D]", output)
        return {"exam": exam_score(said, prompt.gold), "exact": float(said == prompt.gold and not guessed)}

    def _read(self, path: Path) -> Iterator[Example]:
        measured = "f1" if self.subset in F1_SUBSETS else "rouge" if self.subset in ROUGE_SUBSETS else "exam"
        found = False
        what = f"an L-Eval row ({', '.join(COLUMNS)}; as many outputs as instructions)"
        for where, row in json_rows(path, COLUMNS, what):
            if row["evaluation"] != measured:
                continue
            found = True
            instructions, outputs = row["instructions"], row["outputs"]
            if not isinstance(row["input"], str) or not _strings(instructions) or not _strings(outputs):
                raise UserError(f"{where}: not {what}")
            if len(instructions) != len(outputs):
                raise UserError(f"{where}: not {what}")
            for instruction, output in zip(instructions, outputs, strict=True):
                yield from self._examples_of(row["input"], instruction, output, where)
        if not found:
            raise UserError(
                f"--data {path}: no row is measured by {measured!r}, as rows of {self.subset} are; is it the right file?"
            )

    def _examples_of(self, document: str, instruction: str, output: str, where: str) -> Iterator[Example]:
        words = len(output.split())
        if self.subset in LETTER_SUBSETS:
            letters = re.sub("[^A-D]", "", output.split()[0]) if words else ""
            if not letters:
                raise UserError(
                    f"{where}: the output {output!r} begins with no letter from A to D; is this a file of {self.subset}?"
                )
            yield Example(document, instruction, letters, words)
        elif self.subset == "sci_fi":
            found = re.fullmatch(r"\s*(true|false)\W*\[fact:\s*(true|false)\W*\]\s*", output, re.IGNORECASE)
            if not found:
                raise UserError(f"{where}: the output {output!r} is not like 'True [fact: False]'; is this a file of sci_fi?")
            yield Example(document, instruction, found[1].capitalize(), words, "loyalty")
            yield Example(document, instruction.replace(*_WORLDS), found[2].capitalize(), words, "fact")
        else:
            yield Example(document, instruction, output, words)


def _judgement(output: str) -> str | None:
    # The first word that contains "true" or "false"; a word with both counts as "true".
    for word in output.lower().split():
        if "true" in word or "false" in word:
            return "true" if "true" in word else "false"
    return None


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
