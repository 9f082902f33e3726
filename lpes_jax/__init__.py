"""Layer-specific RoPE scaling (LPES) for Llama-family models: search the factors, measure them, use them.

import lpes_jax as lj

model = lj.load_model("smollm2-135m-instruct", dtype="float32")
tokenizer = lj.load_tokenizer("smollm2-135m-instruct")
factors = lj.LayerFactors.load("runs/search/factors.json")  # or from the zoo: "smollm2-135m-instruct/best-kv-5-10-20"
logits = lj.logits(model, tokens, factors)                 # i32[B, T] -> f32[B, T, V]
texts = lj.generate(model, tokenizer, ["..."], factors)
result = lj.run_search(lj.preset("quick"))  # what `python -m lpes_jax.search` runs

`import lpes_jax` does not import JAX: the module of a name is imported when the name is first used.
"""

from typing import TYPE_CHECKING

from lpes_jax import lazy
from lpes_jax import process as process  # first: in a command, it sets up the process before JAX is imported

if TYPE_CHECKING:
    from lpes_jax.api import generate, logits
    from lpes_jax.curves import bezier
    from lpes_jax.errors import UserError
    from lpes_jax.evaluate.run import run_evaluation
    from lpes_jax.factors import LayerFactors
    from lpes_jax.models.llama import Llama, LlamaConfig, load_model, load_tokenizer
    from lpes_jax.rope import scale_layers
    from lpes_jax.scores import population_scores
    from lpes_jax.search.run import run_search
    from lpes_jax.settings.evaluate import EvaluateSettings
    from lpes_jax.settings.search import SearchSettings, preset
else:
    __getattr__, __dir__ = lazy.names(
        __name__,
        {
            "EvaluateSettings": "lpes_jax.settings.evaluate",
            "LayerFactors": "lpes_jax.factors",
            "Llama": "lpes_jax.models.llama",
            "LlamaConfig": "lpes_jax.models.llama",
            "SearchSettings": "lpes_jax.settings.search",
            "UserError": "lpes_jax.errors",
            "bezier": "lpes_jax.curves",
            "generate": "lpes_jax.api",
            "load_model": "lpes_jax.models.llama",
            "load_tokenizer": "lpes_jax.models.llama",
            "logits": "lpes_jax.api",
            "population_scores": "lpes_jax.scores",
            "preset": "lpes_jax.settings.search",
            "run_evaluation": "lpes_jax.evaluate.run",
            "run_search": "lpes_jax.search.run",
            "scale_layers": "lpes_jax.rope",
        },
    )

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
