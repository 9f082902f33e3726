"""Questions whose score says nothing: their faults are counted in every record, and `--drop-leaky` leaves them out.

A task says which faults a question has, by the metrics that it has (`Prompt.faults`):

    gold_empty              of a gold answer the metric's own normalisation leaves nothing ("", "*", "The"): no output is right,
                            or every one is
    answer_in_distractors   what stands beside the fact holds the answer too: another pair, another document, an option that
                            is the same text
"""

from collections.abc import Sequence

from lpes_jax.errors import UserError
from lpes_jax.tasks.prompts import Prompt

FAULTS = ("gold_empty", "answer_in_distractors")


def count_leaky(prompts: Sequence[Prompt], drop: bool = False) -> tuple[list[Prompt], dict[str, int]]:
    """The prompts, with `drop` without those of questions that have a fault at any position, and how many questions have which.

    Counts: `questions_gold_empty` and `questions_answer_in_distractors`, of all questions, and `questions_dropped` of them.
    Raises UserError where nothing is left.
    """
    found: dict[str, set[str]] = {}
    for prompt in prompts:
        found.setdefault(prompt.example, set()).update(prompt.faults)
    faulty = {example for example, faults in found.items() if faults}
    counts = {f"questions_{fault}": sum(fault in faults for faults in found.values()) for fault in FAULTS}
    counts["questions_dropped"] = len(faulty) if drop else 0
    kept = [prompt for prompt in prompts if not (drop and prompt.example in faulty)]
    if prompts and not kept:
        raise UserError(f"--drop-leaky leaves out all {len(found)} questions: their golds are empty, or stand in distractors")
    return kept, counts
