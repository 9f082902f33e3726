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
from lpes_jax.settings.tree import Settings, rare, when


@dataclass(frozen=True)
class MethodsSettings(Settings):
    """The methods."""

    methods: tuple[str, ...] = ("all",)
    """all, or some by name: baseline, uniform, pi, yarn, moice, lpes, ...
    The others: dynamic_ntk, ntk_by_base, attention_buckets, ms_poe, self_extend, hidden_channel, zero_tuning, seal,
    and learnt_factors, learnt_gains, learnt_both: LPES learnt on these search questions, as seal is."""
    budget: int = 16
    """Settings that may be tried for a method.
    seal and learnt_*: passes over the search questions."""
    other_tasks: Path | None = None
    """A TOML file of tasks on which nothing is tuned: every method is measured there too.
    It has a block [[task]] for each, as in search --mixture: task = its name, its flags by their names, and optionally its own
    test_limit (default: --test-limit)."""
    repeats: int = rare(20)
    """Rounds of the timing."""
    channel_strings: int = rare(200)
    """hidden_channel: random strings for finding positional channels.
    Of at most 1,000 tokens."""


@dataclass(frozen=True)
class RouterSettings(TextFileSettings):
    """MoICE's router."""

    router: Path | None = None
    """A router that was trained before (default: one is trained).
    It is trained on --text."""
    router_steps: int = rare(7)
    """Steps of that training."""
    router_batch: int = rare(128)
    """Windows of 512 tokens per step of that training."""


@dataclass(frozen=True)
class CompareSettings(Settings):
    """What to compare, on what."""

    task: TaskSettings = TaskSettings()
    methods: MethodsSettings = MethodsSettings()
    factors: FactorsSettings = FactorsSettings()
    router: RouterSettings = when(RouterSettings(), methods=("all", "moice"))
    questions: HeldOutQuestionSettings = HeldOutQuestionSettings(limit=50, test_limit=200)
    run: ResumableRunSettings = ResumableRunSettings(output_path=Path("runs/compare"))
    devices: DeviceSettings = DeviceSettings()
