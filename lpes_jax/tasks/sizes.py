"""Set a task's length in tokens, `with_length(task, 4096, tokenizer)`, or remove its haystack, `without_haystack(task)`.

For the tasks whose fact is one of countable items: kv, needle, niah, vt.
"""

from dataclasses import replace
from typing import Any

from lpes_jax.errors import UserError
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.needle import Needle
from lpes_jax.tasks.niah import Niah
from lpes_jax.tasks.prompts import Tokenizer, token_ids
from lpes_jax.tasks.variable_tracking import VariableTracking

SETTINGS = {KeyValue: "num_pairs", Needle: "num_sentences", Niah: "num_lines", VariableTracking: "num_lines"}
_SAMPLE = 8  # prompts that are measured for a length
_SPARE = 1.5  # margin, as a multiple of the range of their lengths: one prompt in a million is longer


def with_length(task: Any, tokens: int, tokenizer: Tokenizer) -> Any:
    """The task with the most items whose prompts, including answers, have at most `tokens` tokens.

    Items differ by a few tokens. The length is that of the longest of eight prompts plus a margin. Raises UserError if not even
    the fewest items fit.
    """
    setting = SETTINGS[type(task)]

    def size(items: int) -> float:
        sized = replace(task, **{setting: items})
        prompts = [sized.prompt(example, 0) for example in sized.examples("all", _SAMPLE, seed=0)]
        texts = [prompt.text + max(prompt.answers, key=len) for prompt in prompts]
        lengths = [len(ids) for ids in token_ids(tokenizer, texts)]
        return max(lengths) + _SPARE * (max(lengths) - min(lengths))

    low, high = _fewest(task), _fewest(task) + 100
    low_size, high_size = size(low), size(high)
    if low_size > tokens:
        raise UserError(
            f"--lengths: {tokens} tokens are too few for --task {task.name}; its shortest prompts have {low_size:.0f} tokens"
        )
    while high_size <= tokens:
        growth = (high_size - low_size) / (high - low)
        low, low_size = high, high_size
        high = high + max(1, int(1.05 * (tokens - high_size) / growth))
        high_size = size(high)
    while high - low > 1:
        step = int((high - low) * (tokens - low_size) / (high_size - low_size))  # sizes grow almost linearly
        middle = low + min(max(step, 1), high - low - 1)
        if (middle_size := size(middle)) <= tokens:
            low, low_size = middle, middle_size
        else:
            high, high_size = middle, middle_size
    return replace(task, **{setting: low})


def without_haystack(task: Any) -> Any:
    """The task with only the facts that it asks for. Errors on it are not caused by length or position."""
    match task:
        case KeyValue():
            return replace(task, num_pairs=1, queries_per_haystack=1)
        case Needle():
            return replace(task, num_sentences=1, num_keys=task.num_queries)
        case Niah():
            return replace(
                task, num_lines=0, queries_per_haystack=1, num_keys=1 if task.subset == "near_keys" else task.num_keys
            )
        case VariableTracking():
            return replace(task, num_lines=0, num_chains=1, placing="together")
    raise TypeError(f"{type(task).__name__} has no countable items")


def _fewest(task: Any) -> int:
    match task:
        case KeyValue():
            return task.queries_per_haystack + (task.queries_per_haystack > 1)
        case Niah():
            return task.queries_per_haystack if task.queries_per_haystack > 1 else 0
        case VariableTracking() if task.placing == "spread":
            return task.num_hops + 1
        case Needle():
            return 1
    return 0
