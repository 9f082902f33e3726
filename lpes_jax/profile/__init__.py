"""How long a prompt a model reads reliably, and where in it not: `run_profile(ProfileSettings(...))`, `python -m
lpes_jax.profile`.

`run.py` runs the verb, `checks.py` has what is refused before a model is opened. `grid.py` measures, `findings.py` says what it
means, `text_loss.py` has the loss of plain text by position, `page.py` the files. Names are imported when they are used.
"""

from typing import TYPE_CHECKING

from lpes_jax import lazy

if TYPE_CHECKING:
    from lpes_jax.profile.checks import check, check_inputs
    from lpes_jax.profile.run import default_lengths, run_profile
    from lpes_jax.settings.profile import ProfileSettings
else:
    __getattr__, __dir__ = lazy.names(
        __name__,
        {
            "ProfileSettings": "lpes_jax.settings.profile",
            "check": "lpes_jax.profile.checks",
            "check_inputs": "lpes_jax.profile.checks",
            "default_lengths": "lpes_jax.profile.run",
            "run_profile": "lpes_jax.profile.run",
        },
    )

__all__ = ["ProfileSettings", "check", "check_inputs", "default_lengths", "run_profile"]
