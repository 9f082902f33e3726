"""Accuracy by position as a table, for the terminal (rich) and for a README (markdown).

A row is a model with some factors or method; the last columns give its uncertainty and the comparison with the baseline. `show`
prints to the terminal, after the files are written. Nothing is truncated on a narrow terminal, and no text is markup.
"""

import contextlib
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from lpes_jax.process import plain

_ENDLESS = 10_000  # columns, if the output is not a terminal
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True)
class TableRow:
    """A row of a table.

    Attributes:
        name: Of the candidate.
        accuracy: Per position, in percent; `mean` and `standard_error` too.
        p: Against the baseline (`statistics.paired_permutation_test`); None for the baseline itself.
        log_likelihood: The mean over the gold answers.
    """

    name: str
    accuracy: tuple[float, ...]
    mean: float
    standard_error: float
    p: float | None = None
    log_likelihood: float | None = None


@dataclass(frozen=True)
class ScreenTable:
    """Rows of cells for a terminal of any width. No cell is truncated, and none is read as markup.

    It is shown as one table. If that does not fit, as several tables with some of the columns each, all with the first column.
    If these do not fit either, as one line per cell.

    Attributes:
        title: The table's title.
        header: None means that the rows are names and values.
        rows: The cells.
        right: Whether all columns but the first are numbers.
        styles: Styles of cells, by their whole text.
    """

    title: str
    header: Sequence[str] | None
    rows: Sequence[Sequence[str]]
    right: bool = True
    styles: Mapping[str, str] = field(default_factory=dict)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        def shown(cells: Sequence[str]) -> list[str]:
            return [plain(printable(cell), options.encoding) for cell in cells]

        header, rows = shown(self.header or ()), [shown(row) for row in self.rows]
        widths = [max(map(cell_len, column)) for column in zip(*rows, *([header] if header else []), strict=True)]
        room = options.max_width - sum(widths[:1]) - 4
        yield Text(*shown([self.title]), style="table.title", overflow="fold")
        groups: list[list[int]] = [[]]
        for column in range(1, len(widths)):
            if groups[-1] and sum(widths[shown_column] + 3 for shown_column in (*groups[-1], column)) > room:
                groups.append([])
            groups[-1].append(column)
        if max(widths[1:], default=0) + 3 > room or (len(groups) > 1 and not header):
            yield from self._lines(header, rows)
            return
        for group in groups:
            table = Table(show_header=bool(header))
            for column in (0, *group):
                title = Text(header[column] if header else "")
                table.add_column(title, justify="right" if self.right and column else "left", no_wrap=True)
            for row in rows:
                table.add_row(*(Text(row[column], self.styles.get(row[column], "")) for column in (0, *group)))
            yield table

    def _lines(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[Text]:
        for name, *cells in rows:
            if not header:
                yield Text(f"{name}: {' '.join(cells)}", overflow="fold")
                continue
            yield Text(name, overflow="fold")
            for title, cell in zip(header[1:], cells, strict=True):
                yield Text(f"  {title}: {cell}", overflow="fold")


def position_table(rows: Sequence[TableRow], positions: Sequence[int], title: str) -> ScreenTable:
    """The table for the terminal."""
    return ScreenTable(title, _header(positions), [_cells(row) for row in rows])


def show(*parts: ScreenTable | str) -> None:
    """Print tables and lines on standard output, for a person. Files are written before, so a failed print is no error.

    Lines are not wrapped here, so that paths can be copied; a terminal wraps them.
    """
    stream = sys.stdout
    if stream is None:  # closed before Python started
        return
    width = max(Console().width, 20) if stream.isatty() else _ENDLESS
    console = Console(width=width, markup=False, emoji=False, highlight=False, force_jupyter=False)
    with console.capture() as captured:
        for part in parts:
            if isinstance(part, ScreenTable):
                console.print(part)
            else:
                console.print(Text("\n".join(map(printable, part.split("\n")))), soft_wrap=True)
    with contextlib.suppress(OSError, ValueError):  # its reader is gone, or the stream is closed
        stream.write(plain(captured.get(), stream.encoding))
        stream.flush()


def printable(text: str) -> str:
    """The text with control characters and undecodable bytes as escapes, so that a terminal or a plot can show it."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def markdown(rows: Sequence[TableRow], positions: Sequence[int]) -> str:
    """The table in GitHub's markdown, without a newline at its end."""
    header = _header(positions)
    return markdown_table([header, ["---"] + ["---:"] * (len(header) - 1), *map(_cells, rows)])


def differences(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """The entries `against_baseline` of `results.json` as GitHub markdown, with an explanation; "" if there are none."""
    compared = {name: method["against_baseline"] for name, method in methods.items() if "against_baseline" in method}
    lines, exact = [], False
    for name, difference in compared.items():
        cells = []
        for position in difference["by_position"].values():
            mcnemar = position["p_mcnemar"]
            exact |= mcnemar is not None
            cells.append(_difference(position) + ("" if mcnemar is None else f", p {_p(mcnemar)}"))
        if not lines:
            positions = (f"{position} %" for position in difference["by_position"])
            lines += [["points against baseline", *positions, "mean", "p", "p (Holm)"], ["---", *["---:"] * (len(cells) + 3)]]
        lines.append([name, *cells, _difference(difference), _p(difference["p"]), _p(difference["p_holm"])])
    if not lines:
        return ""
    note = "In brackets: 95 % intervals, a paired bootstrap over questions. p: paired permutation test over questions. Holm's "
    note += f"correction covers all {len(compared)} comparisons of this table."
    if exact:
        note += " After a position: McNemar's exact p for that position only, without correction."
    return f"{markdown_table(lines)}\n\n{note}"


def by_task(tasks: Mapping[str, Mapping[str, float]]) -> str:
    """A search's results on each task of a mixture, on the questions that it selected by, as GitHub markdown."""
    has_loss = all("loss" in task for task in tasks.values())
    lines = [["task", "accuracy", "before"], ["---", "---:", "---:"]]
    if has_loss:
        lines = [[*lines[0], "loss (nats per answer)", "before"], [*lines[1], "---:", "---:"]]
    for title, task in tasks.items():
        line = [title, f"{100 * task['accuracy']:.1f}", f"{100 * task['accuracy_at_start']:.1f}"]
        lines.append(line + ([f"{task['loss']:.3f}", f"{task['loss_at_start']:.3f}"] if has_loss else []))
    return markdown_table(lines)


def across_tasks(tasks: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Methods (rows) by tasks (columns), in lines of cells; the first line is the header.

    `tasks`: by title, the methods' figures as in `results.json`. The first task has all methods; of another, those without
    figures were refused.
    """
    lines = [["accuracy on", *tasks]]
    for name in next(iter(tasks.values())):
        cells = [name]
        for methods in tasks.values():
            if (figures := methods.get(name)) is None:
                cells.append("refused")
                continue
            error = figures["acc_stderr,none"]
            cell = f"{100 * figures['acc,none']:.1f} ± {'-' if error is None else f'{100 * error:.1f}'}"
            if (compared := figures.get("against_baseline")) is not None:
                cell += f" ({100 * compared['difference']:+.1f}, p {_p(compared['p_holm'])})"
            cells.append(cell)
        lines.append(cells)
    return lines


def _difference(compared: Mapping[str, Any]) -> str:
    low, high = compared["interval"]
    return f"{100 * compared['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as GitHub markdown; the second line is the dashes."""
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _p(p: float | None) -> str:
    return "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def _header(positions: Sequence[int]) -> list[str]:
    return ["accuracy at", *(f"{position} %" for position in positions), "mean ± s.e.", "p", "log-lik."]


def _cells(row: TableRow) -> list[str]:
    log_likelihood = "-" if row.log_likelihood is None else f"{row.log_likelihood:.2f}"
    accuracy = (f"{value:.1f}" for value in row.accuracy)
    error = f"{row.standard_error:.1f}" if math.isfinite(row.standard_error) else "-"  # one question has none
    return [row.name, *accuracy, f"{row.mean:.1f} ± {error}", _p(row.p), log_likelihood]
