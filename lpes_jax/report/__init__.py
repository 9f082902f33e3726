"""What a run shows: tables and pictures."""

import contextlib
import os
import sys


def _import_matplotlib() -> None:
    """Import it where MPLBACKEND names a backend that is not here, as a notebook's shell does: our pictures need none."""
    if "matplotlib" in sys.modules:
        return
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    with contextlib.suppress(ValueError):
        if backend:  # for whoever wants one
            matplotlib.rcParams["backend"] = backend


_import_matplotlib()
