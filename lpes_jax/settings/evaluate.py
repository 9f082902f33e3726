"""The flags of `evaluate`."""

from dataclasses import dataclass
from pathlib import Path

from lpes_jax.choices import Split
from lpes_jax.settings.groups import (
    FactorsSettings,
    MeshSettings,
    PromptSettings,
    QuestionSettings,
    SeededRunSettings,
    TaskSettings,
)
from lpes_jax.settings.tree import Settings, rare, when


@dataclass(frozen=True)
class MeasuredFactorsSettings(FactorsSettings):
    """The factors, measured beside the unchanged model."""

    only_factors: bool = False
    """Leave out the unchanged model and the plain prompts."""


@dataclass(frozen=True)
class MeasuredQuestionSettings(QuestionSettings):
    """The questions, and how answers are measured."""

    split: Split = "test"
    """test, search or all questions.
    test: never overlaps what a search uses; all: every row of a file."""
    slots: tuple[int, ...] = rare(())
    """Slots (0-based) instead of positions."""
    stop: tuple[str, ...] = rare(())
    """Texts that end an output, besides the model's end and the task's."""
    lengths: tuple[int, ...] = when((), task="needle")
    """Tokens of a prompt, for a heat map of depth and length."""


@dataclass(frozen=True)
class EvaluateSettings(Settings):
    """What to measure."""

    task: TaskSettings = TaskSettings()
    factors: MeasuredFactorsSettings = MeasuredFactorsSettings()
    questions: MeasuredQuestionSettings = MeasuredQuestionSettings()
    prompt: PromptSettings = PromptSettings()
    run: SeededRunSettings = SeededRunSettings(output_path=Path("runs/evaluate"))
    devices: MeshSettings = MeshSettings()
