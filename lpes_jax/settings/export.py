"""The flags of `export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lpes_jax.settings.groups import FactorsSettings, RunSettings
from lpes_jax.settings.tree import Settings


@dataclass(frozen=True)
class FilesSettings(Settings):
    """The files that are written."""

    to: Literal["hf", "hf-hook", "gguf"] = "hf"
    """hf, hf-hook or gguf.
    hf: a folder that contains the factors. hf-hook: the unchanged model, and a torch module that applies them. gguf: a copy of
    a .gguf file that contains them."""
    copy: bool = False
    """Copy the weights instead of linking to them."""
    no_self_test: bool = False
    """Record no logits.
    For models that do not fit into memory as float32."""


@dataclass(frozen=True)
class ExportSettings(Settings):
    """What to write, and where."""

    factors: FactorsSettings = FactorsSettings()
    files: FilesSettings = FilesSettings()
    run: RunSettings = RunSettings(output_path=Path("runs/export"))
