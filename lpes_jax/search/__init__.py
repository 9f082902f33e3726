"""Search a model's layer factors: `run_search(preset("quick"))`, or `python -m lpes_jax.search`.

`run.py` runs the verb; `checks.py` has the checks that need no model. Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from lpes_jax import lazy

if TYPE_CHECKING:
    from lpes_jax.search.checks import check, check_inputs
    from lpes_jax.search.loop import SearchResult
    from lpes_jax.search.run import run_search
    from lpes_jax.settings.search import SearchSettings, preset
else:
    __getattr__, __dir__ = lazy.names(
        __name__,
        {
            "SearchResult": "lpes_jax.search.loop",
            "SearchSettings": "lpes_jax.settings.search",
            "check": "lpes_jax.search.checks",
            "check_inputs": "lpes_jax.search.checks",
            "preset": "lpes_jax.settings.search",
            "run_search": "lpes_jax.search.run",
        },
    )

__all__ = ["SearchResult", "SearchSettings", "check", "check_inputs", "preset", "run_search"]
