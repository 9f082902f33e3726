"""What is refused of a check-up before the model is opened, and before JAX is imported."""

from importlib.util import find_spec

from lpes_jax.checks import check_model_name
from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.settings.doctor import DoctorSettings


def check(settings: DoctorSettings) -> None:
    """Raise UserError for flags that cannot be, and where torch is asked for and missing."""
    check_bounds(settings)
    if settings.checks.compare_with_transformers and find_spec("torch") is None:
        raise UserError("--compare-with-transformers needs torch: pip install torch")


def check_inputs(settings: DoctorSettings) -> None:
    """Raise UserError as `check` does, and for a model that is not there."""
    check(settings)
    check_model_name(settings.run.model)
