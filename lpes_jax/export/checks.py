"""What is refused of an export before its model is opened, and before JAX is imported."""

from pathlib import Path

from lpes_jax.checks import check_model_name
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.limits import check_bounds
from lpes_jax.settings.export import ExportSettings


def check(settings: ExportSettings) -> Path:
    """The factors that are named. Raises UserError for flags that cannot be."""
    check_bounds(settings)
    if settings.factors.factors is None:
        raise UserError("--factors: give the factors.json of a search, or factors of the zoo by name (MODEL/NAME)")
    return settings.factors.factors


def check_inputs(settings: ExportSettings) -> None:
    """Raise UserError as `check` does, and for factors that cannot be used, and for a model that is not there."""
    LayerFactors.load(check(settings))
    check_model_name(settings.run.model)
