"""The flags of `doctor`."""

from dataclasses import dataclass
from typing import Literal

from lpes_jax.settings.groups import ModelSettings, WeightSettings
from lpes_jax.settings.tree import Settings, rare


@dataclass(frozen=True)
class ChecksSettings(WeightSettings):
    """The checks."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """float32, bfloat16, float16, or auto (by the device).
    auto: bfloat16 on a GPU, float32 on a CPU."""
    memory_gb: float | None = None
    """Only plan, for a card with so many GiB; nothing is loaded.
    Default: the plan for this device, then the checks."""
    prompt_tokens: int = rare(2048)
    """Tokens of a prompt in the plan of the memory."""
    num_tokens: int = 400
    """Tokens of the text that the checks run on."""
    compare_with_transformers: bool = False
    """Compare logits and greedy ids with transformers.
    On torch, in float32, on the CPU."""


@dataclass(frozen=True)
class DoctorSettings(Settings):
    """Which model, and how thoroughly."""

    run: ModelSettings = ModelSettings()
    checks: ChecksSettings = ChecksSettings()
