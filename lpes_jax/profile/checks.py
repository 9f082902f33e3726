"""Checks of a profile's settings that need no model and do not import JAX."""

from lpes_jax.checks import check_file, check_model_name
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.limits import check_bounds
from lpes_jax.settings.profile import ProfileSettings
from lpes_jax.tasks.prompts import check_once, check_positions

SHORTEST = 16  # tokens of a prompt: the loss of plain text is measured in eighths of a window


def check(settings: ProfileSettings) -> None:
    """Raise UserError for invalid flags, and for a missing text."""
    check_bounds(settings)
    check_positions(settings.grid.positions)
    check_once(settings.grid.lengths, "--lengths")
    if (least := min(settings.grid.lengths, default=SHORTEST)) < SHORTEST:
        raise UserError(f"--lengths {least}: a profile needs prompts of at least {SHORTEST} tokens; give longer ones")
    check_once(settings.grid.tasks, "--tasks")
    if not settings.grid.tasks:
        raise UserError("--tasks: give at least one task")
    check_file("--text", settings.grid.text, "give a text file in UTF-8")


def check_inputs(settings: ProfileSettings) -> None:
    """Like `check`; also raises UserError for unusable factors, and for a missing model."""
    check(settings)
    if settings.factors.factors is not None:
        LayerFactors.load(settings.factors.factors)
    check_model_name(settings.run.model)
