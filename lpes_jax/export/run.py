"""The verb export: `run_export` checks the settings and writes the folder atomically."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from lpes_jax import process
from lpes_jax.errors import UserError
from lpes_jax.export.checks import check
from lpes_jax.factors import LayerFactors
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

_RECORD = "exported.json"  # the inputs of an exported folder
_WRITERS = {"hf": write_hf_folder, "hf-hook": write_hook_folder, "gguf": write_gguf_folder}
_TOLD_BY = (_RECORD, "lpes_torch.py")  # files that identify an exported folder; only lpes_torch.py: by the first release


def run_export(settings: ExportSettings) -> Path:
    """Write the folder and return its path.

    It is written atomically. Raises UserError if the folder is not empty, if the factors do not fit the model or belong to
    another, or if the model cannot be loaded.
    """
    given = check(settings)
    target = settings.run.output_path
    output.check(target, "export", overwrite=settings.run.overwrite)
    replaces = any((target / name).exists() for name in _TOLD_BY)
    if target.exists() and any(target.iterdir()) and not replaces:
        raise UserError(f"--output-path {target}: exists and is not empty; use another path, or remove it")
    factors = LayerFactors.load(given)
    source = resolve(settings.run.model)
    if replaces and target.resolve() in (source.resolve(), *source.resolve().parents):
        raise UserError(f"--output-path {target} contains the model to export; give another folder")
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
    """A temporary folder next to `target`, which is removed at the end, also after a signal."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name[:32]}-") as folder:

        def remove() -> None:
            for _ in range(20):  # files may still be written there
                shutil.rmtree(folder, ignore_errors=True)
                if not os.path.exists(folder):
                    break

        with process.cleaning(remove):
            yield folder
