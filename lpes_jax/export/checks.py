"""Checks of an export's settings that need no model and do not import JAX."""

from pathlib import Path

from lpes_jax.checks import check_model_name
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.limits import check_bounds
from lpes_jax.settings.export import ExportSettings


def check(settings: ExportSettings) -> Path:
    """The path of the named factors. Raises UserError for invalid flags."""
    check_bounds(settings)
    if settings.factors.factors is None:
        raise UserError("--factors: give the factors.json of a search, or factors of the zoo by name (MODEL/NAME)")
    return settings.factors.factors


def check_inputs(settings: ExportSettings) -> None:
    """Like `check`; also raises UserError for unusable factors, and for a missing model."""
    LayerFactors.load(check(settings))
    check_model_name(settings.run.model)
