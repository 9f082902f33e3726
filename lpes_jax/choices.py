"""The named choices that flags and functions share. This module imports nothing: a flag's type costs no start-up time."""

from typing import Literal

TaskName = Literal[
    "kv", "mdqa", "needle", "niah", "vt", "cwe", "fwe", "many_shot", "zero_scrolls", "l_eval", "mmlu", "ceval", "perplexity"
]
ProfileTask = Literal["kv", "single_1", "multikey_2", "multikey_3", "near_keys", "vt"]
Placing = Literal["spread", "together"]  # where the facts of a task with several stand (lpes_jax.tasks.variable_tracking)
FirstLine = Literal["stripped", "original", "all"]  # which line of an output is scored (lpes_jax.tasks.metrics)
Split = Literal["search", "test", "all"]  # which questions of a task
Overlength = Literal["error", "skip"]  # what happens to a prompt that is too long for the model's window
PromptForm = Literal["vicuna", "stablebeluga", "llama2"]  # chat forms known by name (lpes_jax.models.llama.chat)
Dtype = Literal["auto", "float32", "bfloat16"]
Granularity = Literal["layer", "layer_band", "layer_group", "layer_group_band"]  # what has a factor (lpes_jax.rope)
Curve = Literal["bezier", "linear", "step", "free", "authors", "shared"]  # lpes_jax.curves; the last: lpes_jax.search.space
Learn = Literal["factors", "gains", "both"]
Parameter = Literal["factor", "multiplier", "log"]
FitnessName = Literal["accuracy", "log_likelihood", "metric"]
