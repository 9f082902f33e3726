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

This file checks what is asked, and puts the folder in place, whole or not at all; `lpes_jax.ship` has a module for each form.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError

from lpes_jax import process
from lpes_jax.cli import run_verb
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.limits import check_bounds
from lpes_jax.models.llama.checkpoint import open_checkpoint
from lpes_jax.models.llama.tokenizer import load_tokenizer
from lpes_jax.models.zoo import resolve
from lpes_jax.report.tables import show
from lpes_jax.same_model import check_model
from lpes_jax.settings.export import ExportSettings
from lpes_jax.ship.gguf_patch import write_gguf_folder
from lpes_jax.ship.hf import write_hf_folder
from lpes_jax.ship.hook import write_hook_folder
from lpes_jax.store import output
from lpes_jax.store.files import unwritable, write_json
from lpes_jax.store.provenance import environment

_RECORD = "exported.json"  # what a folder was made of
_WRITERS = {"hf": write_hf_folder, "hf-hook": write_hook_folder, "gguf": write_gguf_folder}
_TOLD_BY = (_RECORD, "lpes_torch.py")  # an exported folder; lpes_torch.py alone: of the first release


def run_export(settings: ExportSettings) -> Path:
    """Write the folder and return its path.

    It appears whole or not at all. Raises UserError where it is not empty, where the factors do not fit the model or are
    another's, and where the model cannot be loaded.
    """
    check_bounds(settings)
    target = settings.run.output_path
    if settings.factors.factors is None:
        raise UserError("--factors: give the factors.json of a search, or factors of the zoo by name (MODEL/NAME)")
    output.check(target, "export", overwrite=settings.run.overwrite)
    replaces = any((target / name).exists() for name in _TOLD_BY)
    if target.exists() and any(target.iterdir()) and not replaces:
        raise UserError(f"--output-path {target}: exists and is not empty; give another, or remove it")
    factors = LayerFactors.load(settings.factors.factors)
    source = resolve(settings.run.model)
    if replaces and target.resolve() in (source.resolve(), *source.resolve().parents):
        raise UserError(f"--output-path {target} holds the model that is to be exported; give another folder")
    checkpoint = open_checkpoint(source)
    tokenizer = load_tokenizer(source)
    sha256 = checkpoint.sha256()
    found_for = check_model(
        factors,
        checkpoint.config,
        tokenizer=tokenizer,
        sha256=sha256,
        other_model=settings.factors.other_model,
        where=str(settings.factors.factors),
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(target) as temporary:
            folder = Path(temporary) / "export"
            folder.mkdir()
            lines = _WRITERS[settings.files.to](
                checkpoint,
                tokenizer,
                folder,
                factors,
                found_for=found_for,
                copy=settings.files.copy,
                self_test=not settings.files.no_self_test,
            )
            record = {
                "to": settings.files.to,
                "model": {"name": settings.run.model, "sha256": sha256},
                "factors": {"name": str(settings.factors.factors), "sha256": factors.sha256, "found_for": found_for},
                "versions": environment()["versions"],
            }
            write_json(folder / _RECORD, record)
            with process.unbroken():
                if replaces:
                    os.rename(target, Path(temporary) / "replaced")
                elif target.exists():
                    target.rmdir()
                os.rename(folder, target)
    except (OSError, SafetensorError) as error:
        raise unwritable(error, f"--output-path {target}", "give another folder, or make room") from error
    show(f"exported: {target}", *(line.format(out=target) for line in lines))
    return target


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[str]:
    """A folder beside `target`, which is removed in the end, also where a signal is that."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name[:32]}-") as folder:

        def remove() -> None:
            for _ in range(20):  # files may still be written there
                shutil.rmtree(folder, ignore_errors=True)
                if not os.path.exists(folder):
                    break

        with process.cleaning(remove):
            yield folder


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_verb(ExportSettings(), run_export, __doc__ or "", arguments, "export")


if __name__ == "__main__":
    sys.exit(process.ended(main()))
