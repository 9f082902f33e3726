"""The flags of `compare`."""

from dataclasses import dataclass
from pathlib import Path

from lpes_jax.settings.groups import (
    DeviceSettings,
    FactorsSettings,
    HeldOutQuestionSettings,
    ResumableRunSettings,
    TaskSettings,
    TextFileSettings,
)
from lpes_jax.settings.tree import Settings


@dataclass(frozen=True)
class MethodsSettings(Settings):
    """The methods."""

    methods: tuple[str, ...] = ("all",)
    """baseline, uniform, pi, dynamic_ntk, ntk_by_base, yarn, attention_buckets, ms_poe, moice, self_extend, hidden_channel,
    lpes; or all."""
    budget: int = 16
    """Settings that may be tried for a method."""
    repeats: int = 20
    """Rounds of the timing."""
    channel_strings: int = 200
    """hidden_channel: random strings of at most 1,000 tokens that positional channels are looked for on."""


@dataclass(frozen=True)
class RouterSettings(TextFileSettings):
    """MoICE's router."""

    router: Path | None = None
    """moice: a router that was trained before (default: one is trained, on --text)."""
    router_steps: int = 7
    """moice: steps of that training."""
    router_batch: int = 128
    """moice: windows of 512 tokens per step."""


@dataclass(frozen=True)
class CompareSettings(Settings):
    """What to compare, on what."""

    run: ResumableRunSettings = ResumableRunSettings(output_path=Path("runs/compare"))
    task: TaskSettings = TaskSettings()
    methods: MethodsSettings = MethodsSettings()
    factors: FactorsSettings = FactorsSettings()
    router: RouterSettings = RouterSettings()
    questions: HeldOutQuestionSettings = HeldOutQuestionSettings(limit=50, test_limit=200)
    devices: DeviceSettings = DeviceSettings()
