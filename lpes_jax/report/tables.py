"""Accuracy by position as a table: for the terminal (rich) and for a README (markdown).

A row is a model with some factors or method; the last columns say how sure it is and how it compares with the baseline.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *map(_cells, rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _header(positions: Sequence[int]) -> list[str]:
    return ["accuracy at", *(f"{position} %" for position in positions), "mean ± s.e.", "p", "log-lik."]


def _cells(row: Row) -> list[str]:
    p = "-" if row.p is None else "<0.001" if row.p < 0.001 else f"{row.p:.3f}"
    log_likelihood = "-" if row.log_likelihood is None else f"{row.log_likelihood:.2f}"
    accuracy = (f"{value:.1f}" for value in row.accuracy)
    return [row.name, *accuracy, f"{row.mean:.1f} ± {row.standard_error:.1f}", p, log_likelihood]
