"""Tables and plots of a run."""

import contextlib
import os
import sys


def _import_matplotlib() -> None:
    """Import matplotlib even if MPLBACKEND names a missing backend, as in a notebook's shell: our plots need no backend."""
    if "matplotlib" in sys.modules:
        return
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    with contextlib.suppress(ValueError):
        if backend:  # for other users of matplotlib
            matplotlib.rcParams["backend"] = backend


_import_matplotlib()
