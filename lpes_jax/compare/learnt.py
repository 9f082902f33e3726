"""What methods learn before they are tuned, kept in the run's parts: an interrupted comparison learns it once."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from lpes_jax.store.parts import Parts


class Learnt:
    """`Tuning.once` with a memory on the disk. Calls with the same name are told apart by their order."""

    def __init__(self, kept: Parts):
        self._kept, self._calls = kept, Counter[str]()

    def __call__(self, name: str, find: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
        """The arrays that `find` found in this run or before its interruption. Those that are not finite are not kept."""
        self._calls[name] += 1
        key = f"{name}-{self._calls[name]}"
        if key in self._kept.records["learnt"]:
            return arrays_of(self._kept.records["learnt"][key])
        arrays = find()
        if all(np.isfinite(array).all() for array in arrays):
            self._kept.keep("learnt", key, {"arrays": [{"dtype": str(a.dtype), "values": a.tolist()} for a in arrays]})
        return arrays


def arrays_of(record: dict[str, Any]) -> list[np.ndarray]:
    """The arrays of a record. Raises KeyError, TypeError or ValueError if it is damaged."""
    found = [np.array(array["values"], np.dtype(array["dtype"])) for array in record["arrays"]]
    if not found or any(array.dtype.kind not in "if" for array in found):
        raise TypeError("no numbers")
    return found
