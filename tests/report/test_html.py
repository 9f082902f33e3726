"""The page needs nothing but itself, shows all that it was given, and fits a phone."""

import base64
import os
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from lpes_jax.evaluate import EvaluateSettings
from lpes_jax.report.html import write_page
from lpes_jax.report.plots import factors_by_layer, search_history, u_curve
from lpes_jax.report.tables import TableRow, markdown

pytestmark = pytest.mark.pictures
MODEL = '<script>alert(1)</script>&"a|b" ' + "long/" * 40
ROWS = [TableRow(f"{MODEL} {number}", (90.7, 56.7, 95.0), 80.8, 1.3, p=0.0441) for number in range(3)]
RECORD = {
    "config": {"model": MODEL, "positions": [0, 50, 100], "stop": [], "model_identity": {"name": MODEL, "sha256": "f" * 64}},
    "versions": {"jax": "0.10.2", "a name of so many words that it leaves no room on a phone": "123456789"},
    "devices": {"kind": "<cpu>"},
    "total_evaluation_time_seconds": 12.5,
}
SEARCH = {"individuals": 6, "evaluations": 5, "seconds": 3.25, "fitness_of_best": 0.87}
HISTORY = [
    {"generation": index // 3, "cached": index == 4, "fitness": fitness}
    for index, fitness in enumerate([0.1, 0.5, None, 0.4, 0.5, 0.87])
]
DESCENT = [
    {"step": step, "fitness": -1.0 / step, "task_losses": [1.0 / step, 2.0], "text_loss": 3.1, "train_loss": None}
    for step in (1, 10, 20)
]


class Page(HTMLParser):
    """What a browser would see."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.images: dict[str, bytes] = {}
        self.cells: list[str] = []
        self.words = ""
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self._tag = tag
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag == "img":
            kind, _, data = dict(attrs)["src"].partition(",")
            assert kind == "data:image/svg+xml;base64"
            self.images[dict(attrs)["alt"]] = base64.b64decode(data)

    def handle_data(self, data):
        self.words += data
        if self._tag in ("td", "th"):
            self.cells.append(data)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pictures")
    curves = {"baseline": ([0.9, 0.5, 0.9], 100), "found": ([0.9, 0.8, 0.9], 100)}
    finer = np.exp(np.random.default_rng(0).normal(0, 0.3, (6, 4)))
    return {
        "Accuracy by position: <50 pairs>": u_curve(folder / "positions", [0, 50, 100], curves, "50 pairs")[1],
        "Factors by layer": factors_by_layer(folder / "factors", finer, None, None, "factors", "layer_band")[1],
        "All individuals": search_history(folder / "history", HISTORY, "ga")[1],
        "Losses": search_history(folder / "losses", DESCENT, "gradient")[1],
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory, pictures) -> Path:
    settings = EvaluateSettings.of(model=MODEL, positions=(0, 50, 100), only_factors=True, limit=8)
    text = f"50 pairs\n\n{markdown(ROWS, [0, 50, 100])}\n\n{MODEL}: left out. <too long>\n"
    folder, title, preset = tmp_path_factory.mktemp("page"), f"Evaluate: {MODEL}", {"limit": 8, "seed": 3}
    return write_page(folder, "evaluate", title, settings, RECORD, text, pictures, SEARCH, preset)


def test_the_page_needs_nothing_but_itself_and_holds_the_pictures(page, pictures):
    text = page.read_text(encoding="utf-8")
    seen = Page(text)
    assert all(link.startswith("data:") for link in seen.links) and not {"script", "link", "iframe"} & set(seen.tags)
    assert not re.search(r"url\(|@import", text)
    assert seen.images == {caption: picture.read_bytes() for caption, picture in pictures.items()}
    assert (
        'name="viewport" content="width=device-width' in text
        and "max-width: 100%" in text.partition("img {")[2].partition("}")[0]
    )
    assert os.listdir(page.parent) == ["report.html"]  # nothing half-written beside it


def test_what_it_was_given_is_there_as_text(page):
    text = page.read_text(encoding="utf-8")
    seen = Page(text)
    assert f"python -m lpes_jax.evaluate --only-factors --positions 0 50 100 --model '{MODEL}' --seed 0" in seen.words
    assert f"{MODEL}: left out. <too long>" in seen.words and "<script" not in text and "<too" not in text
    for row in ROWS:  # every cell of the table, with a | inside of one
        index = seen.cells.index(row.name)
        assert seen.cells[index + 1 : index + 7] == ["90.7", "56.7", "95.0", "80.8 ± 1.3", "0.044", "-"]
    for name, value in (("search (s)", "3.25"), ("individuals", "6"), ("kind", "<cpu>"), ("jax", "0.10.2")):
        assert seen.cells[seen.cells.index(name) + 1] == value
    assert "stop" not in seen.cells  # nothing to say


def test_a_page_that_cannot_be_finished_leaves_the_old_one(page, pictures):
    before = page.read_bytes()
    with pytest.raises(OSError):
        gone = pictures | {"gone": page.parent / "gone.svg"}
        write_page(page.parent, "evaluate", "another", EvaluateSettings(), RECORD, "", gone)
    assert page.read_bytes() == before


def _browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell", "chromium-headless-shell")
    playwright = Path.home().glob(".cache/ms-playwright/chromium*/chrome-*/*")
    found = (str(path) for path in playwright if path.name in ("chrome", "headless_shell", "chrome-headless-shell"))
    return next(filter(None, map(shutil.which, names)), None) or next(found, None)


@pytest.mark.skipif(_browser() is None, reason="no Chromium here")
def test_on_a_phone_nothing_is_cut_off(page, tmp_path):
    measure = """<script>addEventListener("load", () => {
      const root = document.documentElement, pictures = [...document.images];
      const beyond = [...document.querySelectorAll("body *")].filter(
        element => !element.closest(".table table") && element.getBoundingClientRect().right > root.clientWidth + 0.5);
      const squeezed = [...document.querySelectorAll("th, td")].filter(cell => cell.clientHeight > 5 * cell.clientWidth);
      parent.postMessage([root.clientWidth, root.scrollWidth, beyond.length + squeezed.length,
        pictures.filter(picture => picture.naturalWidth > 0 && picture.width > 300).length].join(" "), "*");
    })</script></body>"""
    # A window of a desktop browser may have a least width (500 in some); a frame has the width that it is given.
    phone = """<!doctype html><script>addEventListener("message", event => { document.title = event.data; })</script>
      <iframe src="measured.html" style="width: 390px; height: 844px; border: 0"></iframe>"""
    measured = tmp_path / "measured.html"
    (tmp_path / "phone.html").write_text(phone, encoding="utf-8")
    opened = page.read_text(encoding="utf-8").replace("<details>", "<details open>").replace("</body>", measure)
    measured.write_text(opened, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=800,900"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}"]
    command = [str(_browser()), *flags, "--virtual-time-budget=5000", "--dump-dom", (tmp_path / "phone.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r"<title>(\d+) (\d+) (\d+) (\d+)</title>", done.stdout)
    assert found, done.stderr[-2000:]
    width, scrolled, beyond, shown = map(int, found.groups())
    assert width == 390 and scrolled <= width and beyond == 0 and shown == 4
