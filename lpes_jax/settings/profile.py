"""The flags of `profile`."""

from dataclasses import dataclass
from pathlib import Path

from lpes_jax.choices import ProfileTask
from lpes_jax.settings.groups import FactorsSettings, MeshSettings, SeededRunSettings
from lpes_jax.settings.tree import Settings, when


@dataclass(frozen=True)
class GridSettings(Settings):
    """The questions."""

    lengths: tuple[int, ...] = ()
    """Tokens of a prompt (default: an eighth, a quarter, half, all).
    Includes the answer. Of the model's window, or of 8192 tokens if the window is longer."""
    positions: tuple[int, ...] = (0, 25, 50, 75, 100)
    """Positions of the fact, in percent."""
    tasks: tuple[ProfileTask, ...] = ("kv", "single_1", "multikey_2", "multikey_3", "vt")
    """kv, single_1, multikey_2, multikey_3, vt, near_keys.
    kv: key-value pairs; RULER's single_1, multikey_2, multikey_3 and vt (variable tracking, the chain at the position);
    near_keys: a needle among others whose keys share a word with it."""
    key_length: int | None = when(None, tasks="kv")
    """Hexadecimal characters of a key and of a value.
    Default: UUIDs; 8 for tiny-retriever, which reads no others."""
    text: Path | None = None
    """Text file for the loss by position (default: a grammar's sentences)."""


@dataclass(frozen=True)
class JudgementSettings(Settings):
    """How much time it may take, and what counts as reliable."""

    minutes: float = 5.0
    """Time for the whole run, loading and compiling included.
    Cells that are not reached in time stay grey."""
    threshold: float = 0.856
    """Share of the ceiling that counts as reliable (RULER's number).
    The accuracy at the worst position, as a share of the accuracy with only the fact."""
    confidence: float = 0.95
    """Probability that all bounds are right together."""


@dataclass(frozen=True)
class ProfileSettings(Settings):
    """Which model, up to which length, in how much time."""

    grid: GridSettings = GridSettings()
    judgement: JudgementSettings = JudgementSettings()
    factors: FactorsSettings = FactorsSettings()
    run: SeededRunSettings = SeededRunSettings(output_path=Path("runs/profile"))
    devices: MeshSettings = MeshSettings()
