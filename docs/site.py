"""The pages of the site (mkdocs.yml): the repository's Markdown files, and reference pages made from the code.

mkdocs calls `on_files`. Every file has its path in the repository, so that links between files are those that work there, and
`mkdocs build --strict` checks them. What a page links to and no page shows (JSON, TOML, code) is copied.
"""

import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from lpes_jax.help import documented
from lpes_jax.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**/*.md",
    "experiments/**/*.md",
    "models/zoo/**/*.md",
    "tests/*.md",
)
VERBS = ("search", "evaluate", "compare", "profile", "export", "doctor")
LINK = re.compile(r"""\]\(([^)#?\s]+)[^)]*\)|src="([^"]+)\"""")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """All files of the site: the theme's own, the repository's, and the reference."""
    found = {file.src_uri: file for file in files if file.inclusion.is_included() and not _is_in_docs(file, config)}
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    for path in (*pages, *_linked(pages), ROOT / "docs/site.css"):
        name = path.relative_to(ROOT).as_posix()
        found[name] = File.generated(config, name, abs_src_path=str(path))
    for verb in VERBS:
        found[f"reference/{verb}.md"] = File.generated(config, f"reference/{verb}.md", content=flags_page(verb))
    found["reference/python.md"] = File.generated(config, "reference/python.md", content=python_page())
    return Files(list(found.values()))


def _is_in_docs(file: File, config: MkDocsConfig) -> bool:
    return file.abs_src_path is not None and Path(file.abs_src_path).is_relative_to(config.docs_dir)


def _linked(pages: list[Path]) -> Iterator[Path]:
    """The files that pages link to, without the pages."""
    for page in pages:
        for match in LINK.finditer(page.read_text(encoding="utf-8")):
            target = (page.parent / (match[1] or match[2])).resolve()
            if target.is_file() and target.suffix != ".md" and target.is_relative_to(ROOT):
                yield target


def flags_page(verb: str) -> str:
    """The flags of a verb by group, from the settings' classes: name, default, text."""
    main = importlib.import_module(f"lpes_jax.{verb}.__main__")
    settings = getattr(importlib.import_module(f"lpes_jax.settings.{verb}"), f"{verb.capitalize()}Settings")()
    manual, _, rest = (main.__doc__ or "").strip().partition("\n\n")
    lines = (
        [f"# {verb}", "", " ".join(manual.split()), "", "```text", rest.strip(), "```"] if rest else [f"# {verb}", "", manual]
    )
    for heading, rows in _groups(settings):
        lines += ["", f"## {heading}", "", "| flag | default | |", "| --- | --- | --- |", *rows]
    return "\n".join(lines) + "\n"


def _groups(settings: Settings) -> Iterator[tuple[str, list[str]]]:
    first: list[str] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Settings):
            heading = (type(value).__doc__ or "").strip().partition("\n")[0].rstrip(".")
            yield heading, first + [_row(value, inner.name) for inner in dataclasses.fields(value)]
            first = []
        else:
            first.append(_row(settings, field.name))
    if first:
        yield "Others", first


def _row(group: Settings, name: str) -> str:
    value = getattr(group, name)
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    default = "" if value in (None, ()) or isinstance(value, bool) else f"`{shown}`"
    text = " ".join(documented(type(group)).get(name, "").split()).replace("|", "\\|")
    flag = ("--no-" if value is True else "--") + name.replace("_", "-")  # a switch that is on by default can be turned off
    return f"| `{flag}` | {default} | {text} |"


def python_page() -> str:
    """The public names of `lpes_jax`, from their docstrings."""
    package = importlib.import_module("lpes_jax")
    lines = ["# Python", "", "`import lpes_jax as lj`. Shapes are jaxtyping's, in the signatures.", ""]
    for name in package.__all__:
        module = getattr(package, name).__module__
        lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)
