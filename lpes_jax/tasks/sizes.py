"""Tasks of a length in tokens, and with nothing beside the fact: `of_length(task, 4096, tokenizer)`, `alone(task)`.

Of the tasks whose fact stands among items that can be counted: kv, needle, niah, vt.
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
_SAMPLE = 8  # prompts that a length is judged by
_SPARE = 1.5  # of the range of their lengths: a prompt in a million is longer


def of_length(task: Any, tokens: int, tokenizer: Tokenizer) -> Any:
    """The task with the most items whose prompts, answers included, have at most `tokens` tokens.

    Items differ by a few tokens, so this goes by the longest of eight prompts and leaves room for longer ones. Raises UserError
    where not even the fewest items fit.
    """
    setting = SETTINGS[type(task)]

    def size(items: int) -> float:
        of_size = replace(task, **{setting: items})
        prompts = [of_size.prompt(example, 0) for example in of_size.examples("all", _SAMPLE, seed=0)]
        texts = [prompt.text + max(prompt.answers, key=len) for prompt in prompts]
        lengths = [len(ids) for ids in token_ids(tokenizer, texts)]
        return max(lengths) + _SPARE * (max(lengths) - min(lengths))

    low, high = _fewest(task), _fewest(task) + 100
    low_size, high_size = size(low), size(high)
    if low_size > tokens:
        raise UserError(
            f"--lengths: {tokens} tokens hold no prompt of --task {task.name}; its shortest prompts have {low_size:.0f} tokens"
        )
    while high_size <= tokens:
        growth = (high_size - low_size) / (high - low)
        low, low_size = high, high_size
        high = high + max(1, int(1.05 * (tokens - high_size) / growth))
        high_size = size(high)
    while high - low > 1:
        step = int((high - low) * (tokens - low_size) / (high_size - low_size))  # sizes grow nearly evenly
        middle = low + min(max(step, 1), high - low - 1)
        if (middle_size := size(middle)) <= tokens:
            low, low_size = middle, middle_size
        else:
            high, high_size = middle, middle_size
    return replace(task, **{setting: low})


def alone(task: Any) -> Any:
    """The task with nothing beside the facts that it asks for: what is wrong then is no matter of length or position."""
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
    raise TypeError(f"{type(task).__name__} has no fact among items that can be counted")


def _fewest(task: Any) -> int:
    match task:
        case KeyValue():
            return task.queries_per_haystack
        case Niah():
            return task.queries_per_haystack - 1
        case VariableTracking() if task.placing == "spread":
            return task.num_hops + 1
        case Needle():
            return 1
    return 0
