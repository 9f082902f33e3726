"""What goes to a screen: nothing is cut, nothing is markup, and nobody has to read it."""

import io
import os
import re
import sys
import warnings

import pytest
from rich.console import Console

from lpes_jax.process import PLAIN, _Surviving, one_line, plain
from lpes_jax.report.plots import u_curve
from lpes_jax.report.progress import SearchProgress
from lpes_jax.report.tables import ScreenTable, TableRow, position_table, printable, show

POSITIONS = (0, 25, 50, 75, 100)
ROWS = [
    TableRow(name, tuple(10.1 * row + column + 0.5 for column in range(5)), 27.3 + row, 1.8, 0.0314, -12.34 - row)
    for row, name in enumerate(("plain prompt", "base[red]line", "LPES :smile: [/x]"))
]
FIGURES = sorted(f"{value:.1f}" for row in ROWS for value in row.accuracy)


def shown(part: ScreenTable, width: int, **console: object) -> str:
    file = io.StringIO()
    Console(file=file, width=width, **console).print(part)
    return file.getvalue()


@pytest.mark.parametrize("width", [20, 32, 40, 79, 80, 81, 112, 400])
def test_no_width_cuts_a_figure(width):
    text = shown(position_table(ROWS, POSITIONS, "a title [bold]"), width)
    found = re.findall(r"(?<![\d.-])\d+\.\d(?!\d)", text)
    assert all(figure in found for figure in FIGURES) and "…" not in text
    for word in ("base[red]line", ":smile:", "[/x]", "0.031", "-12.34", "-14.34", "[bold]"):
        assert word in text
    assert max(map(len, text.splitlines())) <= width


def test_names_and_values_become_lines_where_a_table_does_not_fit():
    grid = ScreenTable("facts", None, [("files", "/a/[b]/" + "c" * 30), ("weights", "1,234: float32 5 MiB")], right=False)
    wide, narrow = shown(grid, 100), shown(grid, 24)
    assert "/a/[b]/" + "c" * 30 in wide
    assert "/a/[b]/" + "c" * 30 in narrow.replace("\n", "").replace(" ", "") and "1,234:" in narrow


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_show_writes_what_the_encoding_has(encoding, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
    show(position_table(ROWS, POSITIONS, "모델"), "results: br/x[/models]/模型 :smile: \x1b[31m")
    text = raw.getvalue().decode(encoding)
    assert "br/x[/models]/" in text and ":smile:" in text and "\x1b" not in text
    assert ("+/- 1.8" if encoding == "ascii" else "± 1.8") in text
    assert ("模型" if encoding == "utf-8" else "\\u6a21\\u578b") in text
    assert len({len(line) for line in text.splitlines() if "1.8" in line}) == 1  # the columns stand below each other


def test_show_survives_a_reader_that_is_gone(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    show("a line")
    monkeypatch.setattr(sys, "stdout", None)
    show("a line")
    os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # what the stream holds goes there when it is closed
    stream.close()


def test_a_command_s_stream_drops_what_nobody_reads():
    reader, writer = os.pipe()
    stream = io.TextIOWrapper(io.BufferedWriter(_Surviving(writer)), "ascii", PLAIN, line_buffering=True)
    print("± é", file=stream)
    assert os.read(reader, 100) == b"+/- \\xe9\n"
    os.close(reader)
    print("nobody", file=stream)
    print("nobody", file=stream)
    stream.flush()


def test_texts_are_made_plain():
    assert plain("27.0 ± 1.8 …", "ascii") == "27.0 +/- 1.8 ..." and plain("27.0 ± 1.8", "utf-8") == "27.0 ± 1.8"
    assert plain("\udcff", "utf-8") == "\\udcff" and plain("é", None) == "é"
    assert printable("a\tb\x1b[1m\udcff모") == "a\\tb\\x1b[1m\\udcff모"
    assert one_line("a\n b  c") == "a b c" and len(one_line("x" * 5000)) < 300


def test_progress_reads_no_markup():
    file = io.StringIO()
    with SearchProgress(3, Console(file=file, width=30, force_terminal=False)) as progress:
        progress.note("measuring br/x[/models]/[red]m :smile:")
    assert "br/x[/models]/[red]m :smile:" in file.getvalue()


@pytest.mark.pictures
@pytest.mark.parametrize("title", ["cost $5 and $6", "모델", "$\\frac{1$", "a\udcff\n\tb", "/long/" * 60, "_x^2_ & <b>"])
def test_titles_are_drawn_as_they_are(title, tmp_path):
    curves = {"baseline": ([0.9, 0.1], 10), title[:12]: ([0.5, 0.6], 10)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, svg = u_curve(tmp_path / "a", [0, 100], curves, title)
    drawn = svg.read_text(encoding="utf-8")
    if title == "모델":
        assert "\\ubaa8\\ub378" in drawn
    if "5 and" in title:
        assert "cost $5 and $6" in drawn  # words stand in the comments beside their outlines


@pytest.mark.pictures
def test_a_user_s_style_changes_no_picture(tmp_path):
    import matplotlib

    curves = {"baseline": ([0.9, 0.1], 10), "found": ([0.5, 0.6], 10)}
    ours = u_curve(tmp_path / "a", [0, 100], curves, "title")[1].read_bytes()
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "svg.fonttype": "none"}):
        assert u_curve(tmp_path / "b", [0, 100], curves, "title")[1].read_bytes() == ours
