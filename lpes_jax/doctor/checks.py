"""Checks of the doctor's settings that need no model and do not import JAX."""

from importlib.util import find_spec

from lpes_jax.checks import check_model_name
from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.settings.doctor import DoctorSettings


def check(settings: DoctorSettings) -> None:
    """Raise UserError for invalid flags, and if torch is requested and missing."""
    check_bounds(settings)
    if settings.checks.compare_with_transformers and find_spec("torch") is None:
        raise UserError("--compare-with-transformers needs torch: pip install torch")


def check_inputs(settings: DoctorSettings) -> None:
    """Like `check`; also raises UserError for a missing model."""
    check(settings)
    check_model_name(settings.run.model)
