"""Two plain texts: `mixed.txt`, of the kinds that searches use, and `fiction.txt`, which no search uses.

    python experiments/plain_texts.py --data FOLDER --output-path FOLDER

FOLDER contains L-Eval's coursera.jsonl, scientific_qa.jsonl and quality.jsonl in l_eval/, QMSum's ALL_val.jsonl in qmsum/, and
ZeroSCROLLS' gov_report_validation.jsonl and book_sum_sort_validation.jsonl in zero_scrolls/. `mixed` takes lectures, papers,
meetings and reports in turn, `fiction` stories and summaries of novels, each at most MOST characters of a document, so that the
searched first 40 % and the held-out rest of a file have all of its kinds.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from grid import run_script

from lpes_jax.errors import UserError
from lpes_jax.store.files import write_text

MOST = 40_000  # characters of a document
KINDS = {
    "mixed": (
        "l_eval/coursera.jsonl",
        "l_eval/scientific_qa.jsonl",
        "qmsum/ALL_val.jsonl",
        "zero_scrolls/gov_report_validation.jsonl",
    ),
    "fiction": ("l_eval/quality.jsonl", "zero_scrolls/book_sum_sort_validation.jsonl"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where the data is, and where the texts go."""

    data: Path
    """Folder of the data sets."""
    output_path: Path = Path("runs/texts")
    """Folder of mixed.txt and fiction.txt."""


def documents(path: Path) -> Iterator[str]:
    """The documents of a file, without questions, each once."""
    seen = set[str]()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the folder of the data sets to --data") from None
    for line in filter(None, lines):
        row = json.loads(line)
        if "meeting_transcripts" in row:
            text = "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in row["meeting_transcripts"])
        elif "document_start_index" in row:
            text = row["input"][row["document_start_index"] : row["document_end_index"]]
        else:
            text = row["input"]
        text = text.strip()[:MOST]
        if text not in seen:
            seen.add(text)
            yield text


def main(s: Settings) -> None:
    """Write both texts."""
    s.output_path.mkdir(parents=True, exist_ok=True)
    for name, files in KINDS.items():
        alternating = [text for row in zip_longest(*(documents(s.data / file) for file in files)) for text in row if text]
        write_text(s.output_path / f"{name}.txt", "\n\n".join(alternating) + "\n")
        print(f"{name}.txt: {len(alternating)} documents, {sum(map(len, alternating)):,} characters")


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
