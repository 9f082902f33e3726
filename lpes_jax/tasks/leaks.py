"""Questions whose score is meaningless: every record counts their faults, and `--drop-leaky` skips them.

A task reports the faults of a question, depending on its metrics (`Prompt.faults`):

    gold_empty              the metric's normalisation removes all of a gold answer ("", "*", "The"): no output is right, or
                            every output is
    answer_in_distractors   another item contains the answer too: another pair, another document, an option with the same text
"""

from collections.abc import Sequence

from lpes_jax.errors import UserError
from lpes_jax.tasks.prompts import Prompt

FAULTS = ("gold_empty", "answer_in_distractors")


def count_leaky(prompts: Sequence[Prompt], drop: bool = False) -> tuple[list[Prompt], dict[str, int]]:
    """Count the questions with faults, and drop them if `drop` is set.

    Args:
        prompts: Prompts of all questions at all positions.
        drop: Whether to drop questions that have a fault at any position.

    Returns:
        The remaining prompts, and counts: `questions_gold_empty`, `questions_answer_in_distractors` and `questions_dropped`.

    Raises:
        UserError: No question remains.
    """
    found: dict[str, set[str]] = {}
    for prompt in prompts:
        found.setdefault(prompt.example, set()).update(prompt.faults)
    faulty = {example for example, faults in found.items() if faults}
    counts = {f"questions_{fault}": sum(fault in faults for faults in found.values()) for fault in FAULTS}
    counts["questions_dropped"] = len(faulty) if drop else 0
    kept = [prompt for prompt in prompts if not (drop and prompt.example in faulty)]
    if prompts and not kept:
        raise UserError(f"--drop-leaky drops all {len(found)} questions: their golds are empty, or occur in distractors")
    return kept, counts
