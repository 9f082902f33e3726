"""The prompt length up to which a model reads reliably, and the positions where it fails.

Use `run_profile(ProfileSettings(...))`, or `python -m lpes_jax.profile`.

`run.py` runs the verb; `checks.py` has the checks that need no model. `grid.py` measures, `findings.py` draws the conclusions,
`text_loss.py` has the loss of plain text by position, `page.py` writes the files. Names are imported when they are first used.
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
