"""Documents taught in the model's own words: what it answers if it reads only the gold document, where that answer is right.

    python experiments/own_answers.py --model smollm2-135m-instruct --data nq-open-oracle.jsonl.gz --limit 400 \\
        --output-path own.jsonl

A search on mdqa teaches the shortest gold answer. So it changes how a model answers (shorter) as well as what it finds. This
script writes a file that can replace `data` in a mixture. With it, a search teaches the answer that the model gives without
distractors: self-distillation, restricted to right answers as in STaR (Zelikman et al., 2022).

The file has the questions of the search split that the model answered right, with their documents, and all test questions as
they are. An answer is right if its first line contains a gold answer. Distractors are compared with the taught answer, not with
the gold answers, so a random one may contain the gold answer.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grid import run_script

from lpes_jax.errors import UserError
from lpes_jax.evaluation import BASELINE, Candidate, Conditions, evaluate
from lpes_jax.limits import check_bounds
from lpes_jax.models.llama import load
from lpes_jax.store.files import write_text
from lpes_jax.tasks.data import json_rows
from lpes_jax.tasks.mdqa import ROW, MultiDocumentQA, question_split
from lpes_jax.tasks.metrics import first_line

METRIC = "best_subspan_em"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model, and the questions that it is asked."""

    data: Path
    """nq-open-oracle.jsonl.gz, or another file of lost-in-the-middle."""
    model: str = "smollm2-135m-instruct"
    """A name in models/zoo, a folder in Hugging Face layout, a .gguf file, or a Hugging Face hub id."""
    limit: int = 400
    """Questions of the search split that the model is asked."""
    max_new_tokens: int = 40
    """Tokens of an answer; a longer one is cut."""
    output_path: Path = Path("runs/own_answers.jsonl")
    """The file to write."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    batch_size: int | None = None
    """Prompts per forward pass (default: chosen from the memory)."""


def main(s: Settings) -> None:
    """Ask the model, and write the questions that it answered right, and those of the test split."""
    check_bounds(s)
    if s.output_path.is_dir():
        raise UserError(f"--output-path {s.output_path} is a folder; give a file")
    task = MultiDocumentQA(data=s.data, mode="oracle")
    examples = task.examples("search", s.limit, 0)
    loaded = load(s.model, s.dtype)
    conditions = Conditions((METRIC,), max_new_tokens=s.max_new_tokens, stop_ids=loaded.stop_ids, batch_size=s.batch_size)
    [outcome] = evaluate(loaded.model, loaded.tokenizer, task, examples, [(0, 0)], [Candidate(BASELINE)], conditions)
    assert outcome.outputs is not None
    answered = zip(examples, outcome.outputs, outcome.main[:, 0], strict=True)
    own = {example.question: line for example, output, score in answered if score == 1 and (line := first_line(output))}
    if not own:
        raise UserError(f"--model {s.model}: none of its {len(examples)} answers was right; ask more questions with --limit")
    rows = list(rewritten((row for _, row in json_rows(s.data, ("question", "answers", "ctxs"), ROW)), own))
    s.output_path.parent.mkdir(parents=True, exist_ok=True)
    write_text(s.output_path, "".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{s.output_path}: {len(own)} of {len(examples)} questions answered right, {len(rows) - len(own)} test questions")


def rewritten(rows: Iterable[dict[str, Any]], own: Mapping[str, str]) -> Iterable[dict[str, Any]]:
    """The rows of the search split with an own answer, which replaces their answers, and the rows of the test split."""
    for row in rows:
        if question_split(row["question"]) == "test":
            yield row
        elif row["question"] in own:
            yield row | {"answers": [own[row["question"]]]}


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
