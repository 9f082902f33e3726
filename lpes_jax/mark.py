"""The mark of a model that holds factors already: a folder or a .gguf file that `lpes_jax.export` wrote.

Factors in the weights, or in the RoPE that a file describes, cannot be told from the model's own, and given once more they
would count twice. So such files name them: config.json under `lpes_mark`, a GGUF file's metadata under `lpes.mark` (JSON text).

    {"factors_sha256": "6f1c...", "gains": "query weights", "rates": null}

gains, rates: where they are, null where the factors have none. Whatever puts factors into a model calls `refuse_marked`, but
for factors and gains that are all 1.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from lpes_jax.errors import UserError

KEY, GGUF_KEY = "lpes_mark", "lpes.mark"


@dataclass(frozen=True)
class Mark:
    """Which factors (`LayerFactors.sha256`) a model holds, and where its files have them."""

    factors_sha256: str
    gains: str | None = None
    rates: str | None = None

    @classmethod
    def read(cls, value: Any, where: str) -> "Mark | None":
        """The mark in a config or in metadata; None where there is none. Raises UserError for what is none of ours."""
        if value is None:
            return None
        try:
            mark = cls(**(json.loads(value) if isinstance(value, str) else value))
            if isinstance(mark.factors_sha256, str) and all(isinstance(it, str | None) for it in (mark.gains, mark.rates)):
                return mark
        except (TypeError, ValueError):
            pass
        raise UserError(f"{where} is not a mark that this version writes, got {value!r:.60}; export the model again")

    @property
    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @property
    def gguf(self) -> str:
        """As a GGUF file has it."""
        return json.dumps(self.record)

    def __str__(self) -> str:
        held = {"gains": self.gains, "rates": self.rates}
        places = [f"{what} in {place}" for what, place in held.items() if place]
        return f"factors of sha256 {self.factors_sha256:.8} ({', '.join(places) or 'all of them 1'})"


def refuse_marked(mark: Mark | None, where: str = "factors") -> None:
    """Raise UserError where a model holds factors already, and `where` would put some in a second time."""
    if mark is not None:
        raise UserError(f"{where}: the model holds {mark} already; use the model that it was exported from")
