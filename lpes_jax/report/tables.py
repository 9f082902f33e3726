"""Accuracy by position as a table: for the terminal (rich) and for a README (markdown).

A row is a model with some factors or method; the last columns say how sure it is and how it compares with the baseline.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """accuracy: one a position, in percent, as are mean and standard_error; log_likelihood: mean of the gold answers'.

    p: against the baseline (`statistics.paired_permutation_test`), None for the baseline itself.
    """

    name: str
    accuracy: tuple[float, ...]
    mean: float
    standard_error: float
    p: float | None = None
    log_likelihood: float | None = None


def position_table(rows: Sequence[Row], positions: Sequence[int], title: str) -> Table:
    """The table for a terminal."""
    table = Table(title=escape(title))
    for number, head in enumerate(_header(positions)):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, _cells(row)))
    return table


def console() -> Console:
    """Where tables go: stdout, wide enough for one where it is no terminal."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=112)


def markdown(rows: Sequence[Row], positions: Sequence[int]) -> str:
    """The table in GitHub's markdown, without a newline at its end."""
    header = _header(positions)
    return _markdown([header, ["---"] + ["---:"] * (len(header) - 1), *map(_cells, rows)])


def differences(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """What `results.json` has as `against_baseline`, in GitHub's markdown with a line on how to read it; empty without any."""
    compared = {name: it["against_baseline"] for name, it in methods.items() if "against_baseline" in it}
    lines, exact = [], False
    for name, it in compared.items():
        cells = []
        for place in it["by_position"].values():
            mcnemar = place["p_mcnemar"]
            exact |= mcnemar is not None
            cells.append(_difference(place) + ("" if mcnemar is None else f", p {_p(mcnemar)}"))
        if not lines:
            positions = (f"{position} %" for position in it["by_position"])
            lines += [["points against baseline", *positions, "mean", "p", "p (Holm)"], ["---", *["---:"] * (len(cells) + 3)]]
        lines.append([name, *cells, _difference(it), _p(it["p"]), _p(it["p_holm"])])
    if not lines:
        return ""
    note = "In brackets: 95 % intervals, a paired bootstrap over questions. p: paired permutation test over questions; Holm's "
    note += f"takes all {len(compared)} comparisons of this table together."
    if exact:
        note += " Behind a position: McNemar's exact p of that position alone, not corrected."
    return f"{_markdown(lines)}\n\n{note}"


def _difference(it: Mapping[str, Any]) -> str:
    low, high = it["interval"]
    return f"{100 * it['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _p(p: float | None) -> str:
    return "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def _header(positions: Sequence[int]) -> list[str]:
    return ["accuracy at", *(f"{position} %" for position in positions), "mean ± s.e.", "p", "log-lik."]


def _cells(row: Row) -> list[str]:
    log_likelihood = "-" if row.log_likelihood is None else f"{row.log_likelihood:.2f}"
    accuracy = (f"{value:.1f}" for value in row.accuracy)
    error = f"{row.standard_error:.1f}" if math.isfinite(row.standard_error) else "-"  # one question has none
    return [row.name, *accuracy, f"{row.mean:.1f} ± {error}", _p(row.p), log_likelihood]
