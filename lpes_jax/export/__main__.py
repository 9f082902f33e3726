"""Write a model together with its factors as files for other libraries: neither jax nor lpes_jax is needed there.

Examples:
  python -m lpes_jax.export --factors RUN/factors.json --output-path OUT
      the bundled model, with the factors that a search found
  python -m lpes_jax.export --model smollm2-135m-instruct --factors gains-mixture --output-path OUT
      a GGUF file, with gains of the zoo: its weights are written as float32 safetensors
  python -m lpes_jax.export --model DIR --factors RUN/factors.json --copy --output-path OUT
      a folder that can be moved to another machine
  python -m lpes_jax.export --model model.gguf --factors RUN/factors.json --to gguf --output-path OUT
      a copy of a .gguf file, for llama.cpp and ollama

--to hf: OUT is a model folder in which the factors are a property of the files. Gains are in the query weights, and factors
that all layers share in a RoPE of type longrope: a folder like any other, for any server. Other factors are in a modeling file,
which transformers, vLLM and SGLang run with trust_remote_code; without it the folder does not load. `python OUT/self_test.py`
compares transformers with self_test.json, which has prompts and log-probabilities for other servers too.

--to hf-hook: the model as it is, the factors in config.json, and lpes_torch.py, whose apply_layer_factors(model) puts them into
a loaded model (`python OUT/lpes_torch.py` is its self-test). from_pretrained(OUT) alone gives the model without factors.

Weights that do not change are links, without --copy.
"""

import sys
from collections.abc import Sequence

from lpes_jax import export, process
from lpes_jax.cli import run_verb
from lpes_jax.settings.export import ExportSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_verb(
        ExportSettings(),
        lambda flags: export.run_export(flags),
        __doc__ or "",
        arguments,
        "export",
        check=lambda flags: export.check_inputs(flags),
    )


if __name__ == "__main__":
    sys.exit(process.ended(main()))
