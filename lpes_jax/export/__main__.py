"""Write a model together with its factors as files for other libraries, which need neither jax nor lpes_jax.

Examples:
  python -m lpes_jax.export --factors RUN/factors.json --output-path OUT
      the bundled model, with the factors that a search found
  python -m lpes_jax.export --model smollm2-135m-instruct --factors gains-mixture --output-path OUT
      a GGUF file, with gains of the zoo: its weights are written as float32 safetensors
  python -m lpes_jax.export --model DIR --factors RUN/factors.json --copy --output-path OUT
      a folder that can be moved to another machine
  python -m lpes_jax.export --model model.gguf --factors RUN/factors.json --to gguf --output-path OUT
      a copy of a .gguf file, for llama.cpp and ollama

--to hf: OUT is a model folder whose files contain the factors. Gains are in the query weights. Factors that all layers share
are in a RoPE of type longrope; such a folder works in any server. Other factors are in a modeling file, which transformers,
vLLM and SGLang run with trust_remote_code; without it the folder does not load. `python OUT/self_test.py` compares transformers
with self_test.json, which also has prompts and log-probabilities for other servers.

--to hf-hook: the unchanged model, with the factors in config.json, and lpes_torch.py, whose apply_layer_factors(model) applies
them to a loaded model (`python OUT/lpes_torch.py` is its self-test). from_pretrained(OUT) by itself loads the model without
factors.

Unchanged weights are links, unless --copy is given.
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
