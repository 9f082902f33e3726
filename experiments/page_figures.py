"""The measured figures of the README and of docs/: each table between two marks, made from the records in experiments/results.

    python experiments/page_figures.py              print each page that differs from its records
    python experiments/page_figures.py --write      renew the tables

A page names a table of `page_tables.py`, `profile_tables.py`, `rival_tables.py` or `serving_tables.py`:

    <!-- figures: table01 -->
    ...
    <!-- end of figures -->

A test compares the pages with the records, and looks for measured figures outside of such tables.
"""

import argparse
import re
import sys
from pathlib import Path

import page_tables
import profile_tables
import rival_tables
import serving_tables

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"<!-- figures: (?P<name>[\w ]+) -->\n(?P<table>.*?)<!-- end of figures -->\n", re.S)
TABLES = page_tables.TABLES | profile_tables.TABLES | rival_tables.TABLES | serving_tables.TABLES


def pages() -> list[Path]:
    """The README and the pages in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def renewed(text: str) -> str:
    """A page's text with current tables. Raises KeyError for a name that is no table's."""
    return BLOCK.sub(
        lambda match: f"<!-- figures: {match['name']} -->\n{TABLES[match['name']]()}\n<!-- end of figures -->\n", text
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="renew the tables in the pages")
    write = parser.parse_args().write
    old = {path: text for path in pages() if renewed(text := path.read_text(encoding="utf-8")) != text}
    for path, text in old.items():
        print(path.relative_to(ROOT))
        if write:
            path.write_text(renewed(text), encoding="utf-8")
    sys.exit(int(bool(old) and not write))


if __name__ == "__main__":
    main()
