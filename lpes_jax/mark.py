"""The mark of a model that already contains factors: a folder or a .gguf file that `lpes_jax.export` wrote.

Factors inside the weights or the RoPE of a file cannot be told from the model's own values. Applied again, they would count
twice. Exported files therefore name their factors: config.json under `lpes_mark`, GGUF metadata under `lpes.mark` (JSON text).

    {"factors_sha256": "6f1c...", "gains": "query weights", "rates": null}

gains, rates: where the file stores them; null if the factors have none. All code that applies factors to a model calls
`refuse_marked` first, unless all factors and gains are 1.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from lpes_jax.errors import UserError

KEY, GGUF_KEY = "lpes_mark", "lpes.mark"


@dataclass(frozen=True)
class Mark:
    """Which factors (`LayerFactors.sha256`) a model contains, and where its files store them."""

    factors_sha256: str
    gains: str | None = None
    rates: str | None = None

    @classmethod
    def read(cls, value: Any, where: str) -> "Mark | None":
        """Read the mark of a config or of metadata. Returns None if there is none, raises UserError for an unknown form."""
        if value is None:
            return None
        try:
            mark = cls(**(json.loads(value) if isinstance(value, str) else value))
            if isinstance(mark.factors_sha256, str) and all(isinstance(part, str | None) for part in (mark.gains, mark.rates)):
                return mark
        except (TypeError, ValueError):
            pass
        raise UserError(f"{where} is not a mark that this version writes, got {value!r:.60}; export the model again")

    @property
    def record(self) -> dict[str, Any]:
        """The mark as a JSON object."""
        return asdict(self)

    @property
    def gguf(self) -> str:
        """The mark as JSON text, for GGUF metadata."""
        return json.dumps(self.record)

    def __str__(self) -> str:
        parts_stored = {"gains": self.gains, "rates": self.rates}
        parts = [f"{noun} in {stored}" for noun, stored in parts_stored.items() if stored]
        return f"factors of sha256 {self.factors_sha256:.8} ({', '.join(parts) or 'all of them 1'})"


def refuse_marked(mark: Mark | None, where: str = "factors") -> None:
    """Raise UserError if the model already contains factors; `where` names the factors that would be applied again."""
    if mark is not None:
        raise UserError(f"{where}: the model already contains {mark}; use the model that it was exported from")
