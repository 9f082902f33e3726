"""The flags of `profile`."""

from dataclasses import dataclass
from pathlib import Path

from lpes_jax.choices import ProfileTask
from lpes_jax.settings.groups import FactorsSettings, MeshSettings, SeededRunSettings
from lpes_jax.settings.tree import Settings


@dataclass(frozen=True)
class GridSettings(Settings):
    """What is asked."""

    lengths: tuple[int, ...] = ()
    """Tokens of a prompt, its answer included (default: the model's window, at most 8192, and its half, quarter and eighth)."""
    positions: tuple[int, ...] = (0, 25, 50, 75, 100)
    """Positions of the fact, in percent."""
    tasks: tuple[ProfileTask, ...] = ("kv", "single_1", "multikey_2", "multikey_3", "vt")
    """kv: key-value pairs; RULER's single_1, multikey_2, multikey_3 and vt (variable tracking, the chain at the position);
    near_keys: a needle among others whose keys share a word with it."""
    key_length: int | None = None
    """kv: hexadecimal characters of a key and of a value (default: UUIDs; 8 for tiny-retriever, which reads no others)."""
    text: Path | None = None
    """Text file for the loss by position (default: sentences of a grammar)."""


@dataclass(frozen=True)
class JudgementSettings(Settings):
    """How much time it may take, and what counts as reliable."""

    minutes: float = 5.0
    """Time for the whole run, loading and compiling included. Cells that it does not suffice for stay grey."""
    threshold: float = 0.856
    """The least share of what is answered with the fact alone that the worst position may have (default: RULER's number)."""
    confidence: float = 0.95
    """The probability with which all bounds hold together."""


@dataclass(frozen=True)
class ProfileSettings(Settings):
    """Which model, up to which length, in how much time."""

    run: SeededRunSettings = SeededRunSettings(output_path=Path("runs/profile"))
    factors: FactorsSettings = FactorsSettings()
    grid: GridSettings = GridSettings()
    judgement: JudgementSettings = JudgementSettings()
    devices: MeshSettings = MeshSettings()
