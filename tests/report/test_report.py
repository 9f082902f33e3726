"""Tables and pictures show their input; pictures are the same each time."""

import io
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from rich.console import Console

from lpes_jax.report.plots import factors_by_layer, u_curve
from lpes_jax.report.tables import TableRow, markdown, position_table

pytestmark = pytest.mark.pictures

ROWS = [
    TableRow("baseline", (90.7, 56.74, 95.0), 80.81, 1.26),
    TableRow("LPES | [50]", (95.0, 87.9, 100.0), 94.3, 0.8, p=0.0001, log_likelihood=-1.234),
    TableRow("pi", (91.0, 60.0, 95.0), 82.0, 1.2, p=0.0442, log_likelihood=-12.0),
]
POINTS = np.array([(4.7, 1.2), (10, 1.35), (19.7, 1.75), (28.8, 1.5)])
CURVE = np.stack([np.linspace(4.7, 28.8, 50), np.linspace(1.2, 1.5, 50)], axis=1)


def test_markdown():
    assert markdown(ROWS, [0, 50, 100]) == (
        "| accuracy at | 0 % | 50 % | 100 % | mean ± s.e. | p | log-lik. |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| baseline | 90.7 | 56.7 | 95.0 | 80.8 ± 1.3 | - | - |\n"
        "| LPES \\| [50] | 95.0 | 87.9 | 100.0 | 94.3 ± 0.8 | <0.001 | -1.23 |\n"
        "| pi | 91.0 | 60.0 | 95.0 | 82.0 ± 1.2 | 0.044 | -12.00 |"
    )


def test_terminal_table():
    console = Console(file=io.StringIO(), width=100)
    console.print(position_table(ROWS, [0, 50, 100], title="kv [50 pairs]"))
    shown = console.file.getvalue()
    assert "kv [50 pairs]" in shown  # square brackets are text, not markup
    [line] = [line for line in shown.splitlines() if "LPES" in line]
    assert [cell.strip() for cell in line.strip("│ ").split("│")] == [
        *("LPES | [50]", "95.0", "87.9", "100.0", "94.3 ± 0.8", "<0.001", "-1.23")
    ]


def text_of(svg) -> str:
    """The SVG's text: drawn as outlines, with the words in comments."""
    parser = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))
    root = ET.parse(svg, parser).getroot()
    assert root.tag.endswith("svg")
    return "\n".join(node.text for node in root.iter(ET.Comment))


def test_u_curve(tmp_path):
    curves = {"baseline": ([0.9, 0.5, 0.0], 100), "pi": ([0.91, 0.55, 0.9], 100), "found <factors>": ([1.0, 0.9, 1.0], 100)}
    png, svg = u_curve(tmp_path / "kv.50", [0, 50, 100], curves, "Model, 50 pairs")
    assert (png.name, svg.name) == ("kv.50.png", "kv.50.svg")  # a dot in the stem is no suffix
    assert png.read_bytes().startswith(b"\x89PNG")
    words = text_of(svg)
    for expected in ("Model, 50 pairs", "baseline", "found <factors>", "mean 46.7 %", "mean 96.7 %"):
        assert expected in words.replace("&lt;", "<").replace("&gt;", ">")
    picture = svg.read_text()
    assert "#8a8a8a" in picture and "#0072b2" in picture  # the baseline in grey, what was found in blue
    assert "<dc:date>" not in picture

    again = u_curve(tmp_path / "again", [0, 50, 100], curves, "Model, 50 pairs")
    assert again[0].read_bytes() == png.read_bytes() and again[1].read_bytes() == svg.read_bytes()
    wider = u_curve(tmp_path / "wider", [0, 50, 100], {name: (a, 20) for name, (a, _) in curves.items()}, "Model, 50 pairs")
    assert wider[1].read_bytes() != svg.read_bytes()  # fewer questions: other intervals


def test_factors_with_curve_and_control_points(tmp_path):
    factors = np.concatenate([np.ones(2), np.linspace(1.2, 1.5, 30)])
    png, svg = factors_by_layer(tmp_path / "a", factors, POINTS, CURVE, "LPES", layers=(2, 31))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "control points (4.7, 1.2) (10, 1.35) (19.7, 1.75) (28.8, 1.5)" in text_of(svg)
    without = factors_by_layer(tmp_path / "b", factors, None, None, "LPES")[1]
    assert "control points" not in text_of(without)


def test_the_curve_is_stretched_over_its_layers(tmp_path):
    # Another offset and unit of x is the same picture (numbers that binary holds exactly).
    factors = np.linspace(1.2, 1.5, 30)
    curve = np.stack([np.arange(33.0), np.linspace(1.2, 1.5, 33)], axis=1)
    moved = curve * np.array([0.5, 1.0]) + np.array([3.0, 0.0])
    pictures = [
        factors_by_layer(tmp_path / name, factors, None, xy, "LPES", layers=layers)[0].read_bytes()
        for name, xy, layers in (("a", curve, None), ("b", moved, (0, 29)), ("c", curve, (2, 29)))
    ]
    assert pictures[0] == pictures[1] != pictures[2]


@pytest.mark.parametrize(
    "granularity, shape, label",
    [
        ("layer_band", (6, 4), "frequency band"),
        ("layer_group", (6, 4), "KV group"),
        ("layer_group_band", (6, 2, 4), "KV group (in each"),
    ],
)
def test_finer_factors_are_a_heat_map_by_their_granularity(tmp_path, granularity, shape, label):
    factors = np.exp(np.random.default_rng(0).normal(0, 0.3, shape))
    factors.flat[0] = 2.5
    png, svg = factors_by_layer(tmp_path / "a", factors, None, None, "finer", granularity=granularity)
    assert png.read_bytes().startswith(b"\x89PNG")
    words = text_of(svg)
    assert label in words and "<image" in svg.read_text()
    assert "2.50" in words and "1.00" in words and "0.40" in words  # 1 in the middle, 2.5 and 1/2.5 at the ends


def test_plots_do_not_change_matplotlibs_global_state():
    code = "import sys, lpes_jax.report.plots; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
