"""When an answer counts as right."""

from collections.abc import Sequence


def substring(output: str, gold: str) -> bool:
    """lost-in-the-middle's key-value accuracy: the gold value stands anywhere in the output, whatever the case."""
    return gold.lower() in output.lower()


def begins_with(output_ids: Sequence[int], answers_ids: Sequence[Sequence[int]]) -> bool:
    """The `prefix` rule: the generated ids begin with one of the admitted answers' ids."""
    return any(list(output_ids[: len(answer)]) == list(answer) for answer in answers_ids)
