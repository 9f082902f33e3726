"""The Markdown files: every link between files leads to a file (`make docs` checks anchors too)."""

import re
from pathlib import Path

import pytest

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
