"""Layer-specific RoPE scaling (LPES) for Llama-family models: search the factors, measure them, use them.

import lpes_jax as lj

model = lj.load_model("smollm2-135m-instruct", dtype="float32")
tokenizer = lj.load_tokenizer("smollm2-135m-instruct")
factors = lj.LayerFactors.load("runs/search/factors.json")  # or of the zoo: "smollm2-135m-instruct/best-kv-5-10-20"
logits = lj.logits(model, tokens, factors)                 # i32[B, T] -> f32[B, T, V]
texts = lj.generate(model, tokenizer, ["..."], factors)
result = lj.run_search(lj.preset("quick"))  # what `python -m lpes_jax.search` runs
"""

from lpes_jax import process as process  # first: where this is a command, it takes the process over before JAX is imported
from lpes_jax.api import generate, logits
from lpes_jax.curves import bezier
from lpes_jax.errors import UserError
from lpes_jax.evaluate import EvaluateSettings, run_evaluation
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import Llama, LlamaConfig, load_model, load_tokenizer
from lpes_jax.rope import scale_layers
from lpes_jax.scoring import population_scores
from lpes_jax.search import SearchSettings, preset, run_search

__all__ = [
    "EvaluateSettings",
    "LayerFactors",
    "Llama",
    "LlamaConfig",
    "SearchSettings",
    "UserError",
    "bezier",
    "generate",
    "load_model",
    "load_tokenizer",
    "logits",
    "population_scores",
    "preset",
    "run_evaluation",
    "run_search",
    "scale_layers",
]
