"""The named choices that flags and functions share. This module imports nothing: a flag's type costs no start-up time."""

from typing import Literal, get_args

TaskName = Literal[
    "kv", "mdqa", "needle", "niah", "vt", "cwe", "fwe", "many_shot", "zero_scrolls", "l_eval", "mmlu", "ceval", "perplexity"
]
ProfileTask = Literal["kv", "single_1", "multikey_2", "multikey_3", "near_keys", "vt"]
Placing = Literal["spread", "together"]  # where a task with several facts puts them (lpes_jax.tasks.variable_tracking)
FirstLine = Literal["stripped", "original", "all"]  # which line of an output is scored (lpes_jax.tasks.metrics)
Split = Literal["search", "test", "all"]  # which questions of a task
Overlength = Literal["error", "skip"]  # what happens to a prompt that is too long for the model's window
PromptForm = Literal["vicuna", "stablebeluga", "llama2"]  # chat forms known by name (lpes_jax.models.llama.chat)
Dtype = Literal["auto", "float32", "bfloat16"]
WeightFormat = Literal["full", "packed", "int8"]  # how matrices are stored (lpes_jax.models.llama.packed)
ScoreDtype = Literal["fp8", "int8"]  # products in 8 bits (lpes_jax.models.llama.eight_bits)
Granularity = Literal["layer", "layer_band", "layer_group", "layer_group_band"]  # what has a factor (lpes_jax.rope)
GRANULARITIES = get_args(Granularity)
Curve = Literal["bezier", "linear", "step", "free", "authors", "shared"]  # lpes_jax.curves; the last: lpes_jax.search.space
Learn = Literal["factors", "gains", "both"]
Parameter = Literal["factor", "multiplier", "log"]
FitnessName = Literal["accuracy", "log_likelihood", "metric"]

# What `--algorithm` takes. EVOSAX: the algorithms of evosax that need no argument of their own, by the names of their modules.
EVOSAX = (
    *("ars", "asebo", "cma_anchored_les", "cma_es", "cr_fm_nes", "differential_evolution", "diffusion_evolution"),
    *("discovered_es", "esmc", "evotf_es", "gesmr_ga", "gradientless_descent", "guided_es", "hill_climbing"),
    *("iamalgam_full", "iamalgam_univariate", "learned_es", "learned_ga", "lm_ma_es", "ma_es", "mr15_ga"),
    *("noise_reuse_es", "open_es", "persistent_es", "pgpe", "pso", "rm_es", "samr_ga", "sep_cma_es", "simple_es"),
    *("simple_ga", "simulated_annealing", "snes", "xnes"),
)
RANDOM = "random"
INDIVIDUALS = ("ga", RANDOM, *EVOSAX)  # those that score individuals
ALGORITHMS = ("gradient", *INDIVIDUALS)
# What `compare` measures, in the order of its tables (lpes_jax.compare.run has what is tried of each).
METHODS = (
    *("baseline", "uniform", "pi", "dynamic_ntk", "ntk_by_base", "yarn", "attention_buckets", "ms_poe", "moice", "self_extend"),
    *("hidden_channel", "zero_tuning", "seal", "learnt_factors", "learnt_gains", "learnt_both", "lpes"),
)
