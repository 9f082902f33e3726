"""The Markdown files: links lead to files (`make docs` checks anchors too), and commands have flags that exist."""

import importlib
import re
from pathlib import Path

import pytest

from lpes_jax.settings.groups import HostSettings

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs", "experiments", "models/zoo", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
LINK = re.compile(r"""\]\(([^)\s]+)\)|src="([^"]+)\"""")


@pytest.mark.parametrize("folder", [".", *FOLDERS])
def test_links_lead_to_files(folder):
    pages = [page for page in PAGES if (page.parent == ROOT if folder == "." else page.is_relative_to(ROOT / folder))]
    links = [(page, match[1] or match[2]) for page in pages for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    local = [(page, link.partition("#")[0]) for page, link in links if not re.match(r"https?:|mailto:|#", link)]
    broken = [f"{page.relative_to(ROOT)}: {link}" for page, link in local if not (page.parent / link).is_file()]
    assert pages and not broken


def commands(text: str) -> list[str]:
    """Commands in indented lines and in fences, continued lines joined, without comments."""
    joined = re.sub(r"\\\\\n\s*", "", text)
    return [
        line.partition(" #")[0]
        for line in joined.split("\n")
        if re.match(r"\s*(?:\w+=\S+ |srun .*?)?python -m lpes_jax\.|\s*python experiments/", line)
    ]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if commands(page.read_text(encoding="utf-8"))],
    ids=lambda page: page.parent.name + "/" + page.stem,
)
def test_commands_have_flags_that_exist(page):
    wrong = []
    for line in commands(page.read_text(encoding="utf-8")):
        if script := re.search(r"python (experiments/\S+\.py)", line):
            wrong += [] if (ROOT / script[1]).is_file() else [line]
            continue
        verb = re.search(r"lpes_jax\.(\w+)", line)
        assert verb is not None
        if verb[1] == "lm_eval":  # the harness's flags
            continue
        settings = getattr(importlib.import_module(f"lpes_jax.settings.{verb[1]}"), f"{verb[1].capitalize()}Settings")()
        names = {*settings.flat(), *HostSettings().flat()}
        known = {f"--{name.replace('_', '-')}" for name in names} | {"--help", "--help-all"}
        wrong += [f"{flag}: {line}" for flag in re.findall(r"(?<=\s)--[\w-]+", line[verb.end() :]) if flag not in known]
    assert wrong == []
