"""`report.html`: everything that a run found, on one page that needs no network and fits a phone.

The plots are the run's own SVG files, embedded as data URIs; the tables are those of its `results.md`.
"""

import base64
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lpes_jax.settings import Settings
from lpes_jax.store.files import write_text

STYLE = """
body { margin: 0 auto; padding: 1rem; max-width: 60rem; font: 1rem/1.5 system-ui, sans-serif; color: #1a1a1a; }
html { background: #fff; color-scheme: light; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h1, p, figcaption, code, td { overflow-wrap: anywhere; }
code { font: .85rem/1.5 ui-monospace, monospace; }
.command { display: block; padding: .6rem .8rem; background: #f3f3f3; border-radius: .3rem; }
.command span { display: inline-block; max-width: 100%; }
figure { margin: 1rem 0; } img { display: block; width: 100%; max-width: 100%; height: auto; }
figcaption { color: #555; font-size: .9rem; }
.table { overflow-x: auto; margin: 1rem 0; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }
.named th, .named td { white-space: normal; } .named td { min-width: 9rem; }
.right { text-align: right; font-variant-numeric: tabular-nums; } summary { cursor: pointer; }
"""


def write_page(
    folder: Path,
    verb: str,
    title: str,
    settings: Settings,
    record: Mapping[str, Any],
    text: str,
    pictures: Mapping[str, Path],
    search: Mapping[str, Any] | None = None,
    preset: Mapping[str, Any] | None = None,
) -> Path:
    """Write `report.html` into the folder, atomically, and return its path.

    Args:
        folder: The run's folder.
        verb: The verb.
        title: The page's title.
        settings: The verb's flags.
        record: `results.json`.
        text: `results.md`.
        pictures: SVG files by caption.
        search: The entry `search` of factors.json.
        preset: The flags that a preset sets.
    """
    config = {name: value for name, value in record["config"].items() if name not in ("model_identity", "chat")}
    cost = {"whole run (s)": record.get("total_evaluation_time_seconds")}
    if compiled := record.get("compilations"):
        cost |= {"compiling (s)": compiled["seconds"], "programs compiled": compiled["programs"]}
        cost |= {"programs from the cache": compiled["from_cache"]}
    if search is not None:
        cost |= {
            "individuals": search["individuals"],
            "evaluations, including uniform factors": search["evaluations"],
        }
        cost |= {"search (s)": search["seconds"], "fitness of the found factors": search["fitness_of_best"]}
    origin = {name: record.get(name) for name in ("date", "git_commit", "data_sha256", "prompts_sha256", "xla_flags")}
    origin |= {**record["versions"], **record["devices"], "model": record["config"]["model_identity"]}
    command = " ".join(f"<span>{escape(word)}</span>" for word in _command(verb, settings, preset or {}))
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<code class="command">{command}</code>',
        *(_figure(caption, picture) for caption, picture in pictures.items()),
        "<h2>Results</h2>",
        *_blocks(text),
        "<h2>Cost</h2>",
        _named(cost),
        "<h2>Settings and versions</h2>",
        f"<details><summary>settings</summary>{_named(config)}</details>",
        f"<details><summary>versions, devices and hashes</summary>{_named(origin)}</details>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}'
    page = f'<!doctype html>\n<html lang="en">\n<head>{head}</title><style>{STYLE}</style></head>\n<body>\n'
    path = folder / "report.html"
    write_text(path, page + "\n".join(parts) + "\n</body>\n</html>\n")
    return path


def _command(verb: str, settings: Settings, preset: Mapping[str, Any]) -> list[str]:
    """The shell words of a command with the same settings: the flags that differ from their defaults."""
    words = ["python", "-m", f"lpes_jax.{verb}"]
    defaults = type(settings)().flat() | dict(preset)
    for flag, value in settings.flat().items():
        name = flag.replace("_", "-")
        if value == defaults[flag]:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return [shlex.quote(word) for word in words]


def _figure(caption: str, picture: Path) -> str:
    data = base64.b64encode(picture.read_bytes()).decode()
    shown = f'<img alt="{escape(caption)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{shown}<figcaption>{escape(caption)}</figcaption></figure>"


def _blocks(text: str) -> list[str]:
    """Render paragraphs and GitHub's tables, which is all the markdown that results have."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        is_table = len(lines) > 2 and all(line.startswith("|") for line in lines)
        blocks.append(_table(lines) if is_table else f"<p>{escape(block)}</p>")
    return blocks


def _table(lines: Sequence[str]) -> str:
    head, dashes, *body = [[cell.replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    kinds = [' class="right"' if mark.strip().endswith(":") else "" for mark in dashes]

    # Cells beyond the header's are dropped, as on GitHub.
    def row(cells: Sequence[str], tag: str) -> str:
        shown = (f"<{tag}{kind}>{escape(cell.strip())}</{tag}>" for cell, kind in zip(cells, kinds, strict=False))
        return f"<tr>{''.join(shown)}</tr>"

    return f'<div class="table"><table>{row(head, "th")}{"".join(row(cells, "td") for cells in body)}</table></div>'


def _named(values: Mapping[str, Any]) -> str:
    """A table of names and values, without empty ones."""
    rows = []
    for name, value in values.items():
        if value in (None, "", [], ()):
            continue
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        rows.append(f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{escape(shown)}</td></tr>")
    return f'<div class="table named"><table>{"".join(rows)}</table></div>'
