"""The plots of a run: accuracy by position (the U curve), factors by layer (the paper's Figure 2), progress of a search.

Each function writes stem.png and stem.svg. Figures are objects; pyplot, its global state, and the user's backend and style are
not used, so the same input gives the same SVG. Text is shown literally: no mathematics, and characters that the font lacks are
written as escapes. Colours are Okabe and Ito's, which colour-blind readers can tell apart; markers differ as well.
"""

import functools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import matplotlib
import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from lpes_jax.report.tables import printable
from lpes_jax.rope import Granularity
from lpes_jax.statistics import wilson_interval

BASELINE, FOUND = "#8a8a8a", "#0072b2"
OTHERS = ("#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
ROWS = {
    "layer_band": "frequency band (0: fastest)",
    "layer_group": "KV group",
    "layer_group_band": "KV group (in each: frequency bands, fastest below)",
}
Drawing = TypeVar("Drawing", bound=Callable[..., Any])
_TITLE = 84  # characters per line


_MEANING = {"factor": "factor s (positions are divided by it)", "gain": "gain (q . k is multiplied by it)"}


def in_our_style(draw: Drawing) -> Drawing:
    """Draw with matplotlib's defaults in place of the user's settings."""

    @functools.wraps(draw)
    def drawn(*arguments: Any, **named: Any) -> Any:
        ours: Any = {name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")}
        with matplotlib.rc_context(ours):
            return draw(*arguments, **named)

    return drawn  # pyright: ignore[reportReturnType]


@in_our_style
def u_curve(
    stem: Path, positions: Sequence[int], curves: Mapping[str, tuple[Sequence[float], int]], title: str
) -> tuple[Path, Path]:
    """Accuracy by position, with 95 % Wilson intervals.

    Args:
        stem: Path of the files without suffix.
        positions: In percent.
        curves: name -> (accuracy at each position in 0 ... 1, questions at each). The first is the baseline, in grey; the last
        is
            the result, drawn strongest; those between are for comparison.
        title: The plot's title.
    """
    figure = Figure(figsize=(8.4, 4.4), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    for number, (name, (accuracy, n)) in enumerate(curves.items()):
        last = number == len(curves) - 1
        colour = FOUND if last else BASELINE if number == 0 else OTHERS[(number - 1) % len(OTHERS)]
        intervals = np.array([wilson_interval(value * n, n) for value in accuracy])
        percent = 100 * np.asarray(accuracy, float)
        errors = np.abs(100 * intervals.T - percent)  # at 0 and 1 rounding may leave -0.0...1, which errorbar refuses
        shift = 0.7 * (number - (len(curves) - 1) / 2)  # side by side, so that intervals do not cover each other
        axes.errorbar(
            np.asarray(positions) + shift,
            percent,
            yerr=errors,
            label=f"{name}\nmean {percent.mean():.1f} %",
            color=colour,
            marker="o" if last else "s^DvPX"[number % 6],
            markersize=8 if last else 5.5,
            linewidth=2.6 if last else 1.6,
            linestyle="-" if last or number == 0 else "--",
            elinewidth=1.1,
            capsize=3,
            zorder=3 if last else 2,
        )
    axes.set(
        xlabel="position of the fact in the prompt (%)",
        ylabel="accuracy (%), 95 % intervals",
        xticks=list(positions),
        ylim=(0, 102),
    )
    _title(axes, title)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, labelspacing=0.9)
    plain(axes)
    return save(figure, stem)


@in_our_style
def depth_by_length(
    stem: Path, positions: Sequence[int], lengths: Sequence[int], accuracy: Sequence[Sequence[float]], title: str
) -> tuple[Path, Path]:
    """The needle's heat map: depth in percent (down) by tokens of the prompt (across). accuracy: [lengths][positions], 0 ... 1.

    The same numbers are written to stem.csv.
    """
    percent = 100 * np.asarray(accuracy, float).T
    figure = Figure(figsize=(1.6 + 0.9 * len(lengths), 1.6 + 0.6 * len(positions)), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(percent, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(positions)), [f"{position}" for position in positions])
    axes.set(xlabel="tokens of the prompt", ylabel="depth of the needle (%)")
    for row, column in np.ndindex(percent.shape):
        colour = "black" if percent[row, column] > 60 else "white"
        axes.text(column, row, f"{percent[row, column]:.0f}", ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, ax=axes, label="%")
    _title(axes, title, fontsize=9)
    lines = [",".join(["depth", *map(str, lengths)])]
    lines += [
        ",".join([str(depth), *(f"{value:.4f}" for value in row / 100)]) for depth, row in zip(positions, percent, strict=True)
    ]
    stem.with_name(stem.name + ".csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return save(figure, stem)


@in_our_style
def heat_maps(
    stem: Path,
    positions: Sequence[int],
    lengths: Sequence[int],
    accuracy: Mapping[str, Float[np.ndarray, "S N"]],
    undecided: Mapping[str, Bool[np.ndarray, "S N"]],
    title: str,
) -> tuple[Path, Path]:
    """Heat maps by name, side by side: depth in percent (down), tokens of the prompt (across), accuracy in 0 ... 1.

    NaN, for cells that were not measured, is grey; undecided cells have a question mark.
    """
    count = len(accuracy)
    size = (1.6 + count * (0.6 + 0.8 * len(lengths)), 1.6 + 0.5 * len(positions))
    figure = Figure(figsize=size, dpi=200, layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, count, sharey=True, squeeze=False)[0])
    shown_as: Any = {"cmap": matplotlib.colormaps["cividis"].with_extremes(bad="#c8c8c8"), "norm": Normalize(0, 100)}
    for axes, (name, values) in zip(panels, accuracy.items(), strict=True):
        percent = 100 * values
        axes.imshow(np.ma.masked_invalid(percent), aspect="auto", **shown_as)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(positions)), [f"{position}" for position in positions])
        axes.set(xlabel="tokens of the prompt")
        for row, column in np.ndindex(percent.shape):
            if np.isfinite(percent[row, column]):
                shown = f"{percent[row, column]:.0f}{'?' * bool(undecided[name][row, column])}"
                colour = "black" if percent[row, column] > 60 else "white"
                axes.text(column, row, shown, ha="center", va="center", color=colour, fontsize=9)
        if count > 1:
            axes.set_title(printable(name), fontsize=9)
    panels[0].set(ylabel="position of the fact (%)")
    figure.colorbar(ScalarMappable(**shown_as), ax=panels, label="% right")
    figure.suptitle(textwrap.fill(printable(title), _TITLE), x=0.01, ha="left", fontweight="bold", fontsize=10)
    return save(figure, stem)


@in_our_style
def loss_by_position(stem: Path, starts: Sequence[int], losses: Mapping[str, Sequence[float]], title: str) -> tuple[Path, Path]:
    """Loss of plain text in nats per token, from each position on, by name; the first is the baseline, in grey."""
    figure = Figure(figsize=(7.2, 3.6), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    for number, (name, values) in enumerate(losses.items()):
        colour = BASELINE if number == 0 else FOUND
        axes.plot(starts, values, "s-" if number == 0 else "o-", color=colour, linewidth=1.8, markersize=5, label=name)
    axes.set(xlabel="position in the text (tokens)", ylabel="nats per token")
    axes.margins(y=0.15)
    _title(axes, title)
    if len(losses) > 1:
        axes.legend(frameon=False)
    plain(axes)
    return save(figure, stem)


def _finite(values: np.ndarray) -> np.ndarray:
    """Replace infinite values by NaN, which is not drawn."""
    return np.where(np.isfinite(values), values, np.nan)


@in_our_style
def factors_by_layer(
    stem: Path,
    factors: Float[np.ndarray, "L *rest"],
    control_points: Float[np.ndarray, "C 2"] | None,
    curve_xy: Float[np.ndarray, "N 2"] | None,
    title: str,
    granularity: Granularity = "layer",
    layers: tuple[int, int] | None = None,
    what: Literal["factor", "gain"] = "factor",
) -> tuple[Path, Path]:
    """The factor (or gain) of each layer as points, or finer factors (`[L, bands]`, `[L, K]`, `[L, K, bands]`) as a heat map.

    Infinite factors are not drawn.

    Args:
        stem: Path of the files without suffix.
        factors: Factors or gains.
        control_points: The search's control points, in the curve's own x; for `layer` only.
        curve_xy: The curve through them, likewise. Both are stretched in x so that the first and last control points are over
            the first and last layer that get a factor from the curve (Eq. 6).
        title: The plot's title.
        granularity: Granularity of `factors`.
        layers: These two layers; default: the first and the last of all.
        what: What `factors` are.
    """
    figure = Figure(figsize=(7.2, 4.4), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    points, outline = (None if part is None else _finite(part) for part in (control_points, curve_xy))
    if granularity == "layer":
        _points(axes, _finite(factors), points, outline, layers or (0, len(factors) - 1), what)
    else:
        _heat_map(axes, _finite(factors), granularity, what)
    _title(axes, title)
    return save(figure, stem)


@in_our_style
def search_history(
    stem: Path, records: Sequence[Mapping[str, Any]], title: str, tasks: Sequence[str] = ()
) -> tuple[Path, Path]:
    """Progress of a search, from its history: the fitness of all individuals by generation, or losses by step.

    Individuals without a finite fitness are crosses at the bottom. `tasks`: the names of a mixture's tasks.
    """
    figure = Figure(figsize=(7.2, 4.4), dpi=200, layout="constrained")
    if "step" in records[0]:
        _losses(figure, records, tasks)
    else:
        _fitness(figure.add_subplot(), records)
    _title(figure.axes[0], title)
    figure.legend(loc="outside lower center", ncols=2 if "step" in records[0] else 4, frameon=False)
    return save(figure, stem)


def _fitness(axes: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    generation = np.array([record["generation"] for record in records])
    fitness = _column(record["fitness"] for record in records)
    new = np.array([not record["cached"] for record in records])
    # Individuals of a generation side by side, in the order in which they were made.
    same = generation[:, None] == generation
    x, finite = generation + 0.7 * ((np.tril(same).sum(axis=1) - 0.5) / same.sum(axis=1) - 0.5), np.isfinite(fitness)
    if not new.all():
        axes.plot(x[finite & ~new], fitness[finite & ~new], "o", color=BASELINE, markersize=3.5, label="seen before")
    axes.plot(x[finite & new], fitness[finite & new], "o", color=FOUND, markersize=4.5, alpha=0.7, label="scored by the model")
    axes.plot(x, np.fmax.accumulate(fitness), color=OTHERS[0], drawstyle="steps-post", label="best so far")
    if not finite.all():
        bottom = axes.get_xaxis_transform()
        axes.plot(
            x[~finite], np.zeros((~finite).sum()), "x", color=OTHERS[3], transform=bottom, clip_on=False, label="not finite"
        )
    axes.set(xlabel="generation", ylabel="fitness")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plain(axes)


def _losses(figure: Figure, records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """The objective, and in panels below it, on their own scales, its parts, if there is more than one loss."""
    step = [record["step"] for record in records]
    train = _column(record["train_loss"] for record in records)
    objective, text = -_column(record["fitness"] for record in records), _column(record["text_loss"] for record in records)
    tasks, has_text = np.array([record["task_losses"] for record in records], float), bool(np.isfinite(text).any())
    with_tasks = has_text or tasks.shape[1] > 1 or bool(names)
    figure.set_size_inches(7.2, 4.4 + 1.5 * (with_tasks + has_text))
    panels: list[Axes] = list(figure.subplots(1 + with_tasks + has_text, sharex=True, squeeze=False)[:, 0])
    panels[0].plot(step, train, "s--", color=BASELINE, markersize=4, linewidth=1.2, label="objective, minibatches")
    panels[0].plot(step, objective, "o-", color=FOUND, markersize=5, label="objective, held back")
    panels[0].set(ylabel="objective (nats)")
    if with_tasks:
        for number, losses in enumerate(tasks.T):
            name = f"answers, task {number + 1}, held back" if tasks.shape[1] > 1 else "answers, held back"
            name = f"{names[number]}, held back" if names else name
            style = {"color": OTHERS[number % 3], "markersize": 4, "linewidth": 1.2}
            panels[1].plot(step, losses, f"{'vDPX'[number % 4]}-", label=name, **style)
        panels[1].set(ylabel="nats per prompt")
    if has_text:
        panels[2].plot(step, text, "^-", color=OTHERS[3], markersize=4, label="plain text, held back")
        panels[2].set(ylabel="nats per token")
    panels[-1].set(xlabel="step")
    for axes in panels:
        plain(axes)


def _column(values: Iterable[float | None]) -> Float[np.ndarray, "N"]:
    return np.array([np.nan if value is None else value for value in values], float)


def _points(axes: Axes, factors, control_points, curve_xy, layers: tuple[int, int], what: str) -> None:
    ends = control_points if control_points is not None else curve_xy

    def on_layers(x):
        return layers[0] + (x - ends[0, 0]) / (ends[-1, 0] - ends[0, 0]) * (layers[1] - layers[0])

    axes.axhline(1.0, color=BASELINE, linewidth=1.2, label="1: unchanged model")
    if control_points is not None:
        x, y = on_layers(control_points[:, 0]), control_points[:, 1]
        named = " ".join(f"({x:g}, {y:g})" for x, y in control_points.tolist()) if len(control_points) <= 6 else ""
        axes.plot(x, y, "s--", color=OTHERS[0], linewidth=1.2, markersize=8, label=f"control points {named}")
    if curve_xy is not None:
        axes.plot(on_layers(curve_xy[:, 0]), curve_xy[:, 1], color=FOUND, linewidth=1.6, alpha=0.6, label="curve")
    else:
        axes.vlines(range(len(factors)), 1.0, factors, color=FOUND, linewidth=1.2, alpha=0.4)
    axes.plot(range(len(factors)), factors, "o", color=FOUND, markersize=6, label=f"{what} of the layer", zorder=3)
    axes.set(xlabel="layer", ylabel=_MEANING[what])
    axes.margins(y=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.legend(loc="outside lower center", ncols=2, frameon=False)
    plain(axes)


def _heat_map(axes: Axes, factors, granularity: Granularity, what: str) -> None:
    table = factors.reshape(len(factors), -1).T  # columns of a layer: its KV groups, each with its bands
    # Logarithmic and symmetric: white is 1, and 0.5 is as far from white as 2.
    limit = max(np.abs(np.log(table[table > 0])).max(initial=0), np.log(1.1))
    norm = LogNorm(np.exp(-limit), np.exp(limit))
    image = axes.imshow(table, norm=norm, cmap="PuOr", aspect="auto", interpolation="nearest", origin="lower")
    groups, bands = (factors.shape[1], factors.shape[2]) if factors.ndim == 3 else (1, table.shape[0])
    for group in range(1, groups):
        axes.axhline(group * bands - 0.5, color="black", linewidth=0.8)
    if groups > 1:
        axes.set_yticks([bands * (group + 0.5) - 0.5 for group in range(groups)], [str(group) for group in range(groups)])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="layer", ylabel=ROWS[granularity])
    ticks = np.exp(np.linspace(-limit, limit, 5))
    bar = axes.figure.colorbar(image, ax=axes, label=_MEANING[what])
    bar.set_ticks(ticks, labels=[f"{tick:.2f}" for tick in ticks])
    bar.minorticks_off()


def plain(axes: Axes) -> None:
    """Show only the two axes that are read, and a light grid behind the plot."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


def _title(axes: Axes, title: str, **style: Any) -> None:
    """A title above the left edge; a long one is wrapped."""
    axes.set_title(textwrap.fill(printable(title), _TITLE), loc="left", fontweight="bold", **style)


@in_our_style
def save(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write stem.png and stem.svg (a dot in the stem is not a suffix); returns their paths."""
    FigureCanvasAgg(figure)
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if shown := text.get_text():  # not for tick labels, which exist only after the first drawing
            text.set_text(_legible(shown, text))
            text.set_parse_math(False)
    png, svg = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".svg")
    with matplotlib.rc_context({"svg.hashsalt": "lpes"}):  # ids in the SVG depend on this, not on a random number
        figure.savefig(png)
        figure.savefig(svg, metadata={"Date": None})
    return png, svg


def _legible(shown: str, text: Text) -> str:
    """The characters that the text's font has; others as escapes."""
    known = _characters(findfont(text.get_fontproperties()))
    lines = (printable(line) for line in shown.split("\n"))
    return "\n".join(
        "".join(char if ord(char) in known else char.encode("unicode_escape").decode() for char in line) for line in lines
    )


@functools.cache
def _characters(font: str) -> frozenset[int]:
    return frozenset(get_font(font).get_charmap())
