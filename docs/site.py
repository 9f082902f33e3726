"""The pages of the site (mkdocs.yml): the repository's Markdown files, and reference pages made from the code.

mkdocs calls `on_files`. Every file has its path in the repository, so that links between files are those that work there, and
`mkdocs build --strict` checks them. What a page links to and no page shows (JSON, TOML, code) is copied. The notebook is run
(unless RUN_NOTEBOOK is false): its page shows what it printed and drew, and a cell that fails ends the build. For CI,
RUN_NOTEBOOK=short runs all of it with a small search.
"""

import base64
import dataclasses
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient

from lpes_jax.help import documented
from lpes_jax.settings import Settings
from lpes_jax.settings.groups import HostSettings

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
SHORT = {
    **{"limit": 2, "test_limit": 2, "uniform_candidates": 1, "generations": 1},
    **{"population_size": 4, "parents": 2, "mutations": 1, "crossovers": 1},
}  # of a small search
VERBS = ("search", "evaluate", "compare", "profile", "export", "doctor")
ON_SEVERAL_HOSTS = ("search", "evaluate")
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
    for name, content in {"glossary": glossary_page(), "fields": fields_page()}.items():
        found[f"reference/{name}.md"] = File.generated(config, f"reference/{name}.md", content=content)
    for name, content in notebook_files(ROOT / "docs/tutorials/demo.ipynb", config.extra["run_notebook"]).items():
        found[name] = File.generated(config, name, content=content)
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
    hosts = [("Several hosts", [_row(HostSettings(), field.name) for field in dataclasses.fields(HostSettings)])]
    for heading, rows in [*_groups(settings), *(hosts if verb in ON_SEVERAL_HOSTS else [])]:
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


def glossary_page() -> str:
    """The glossary of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = re.search(r"^## Glossary\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert section is not None
    return f"# Glossary\n{section[1]}"


def fields_page() -> str:
    """The fields of each file, from its JSON Schema."""
    lines = ["# Fields of files", "", "From the JSON Schemas. A field in bold is always there.", ""]
    for path in sorted((ROOT / "docs/schemas").glob("*.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        lines += [f"## {schema['title']}", "", schema["description"], "", "| field | type | |", "| --- | --- | --- |"]
        for name, field in schema["properties"].items():
            shown = f"**`{name}`**" if name in schema.get("required", ()) else f"`{name}`"
            lines.append(f"| {shown} | {_type(field)} | {field['description']} |")
        lines.append("")
    return "\n".join(lines)


def _type(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    kinds = field.get("type") or [_type(one) for one in field.get("anyOf", ())]
    return kinds if isinstance(kinds, str) else " or ".join(dict.fromkeys(kinds))


def notebook_files(path: Path, run: bool | Literal["short"]) -> dict[str, str | bytes]:
    """A notebook's page in Markdown, and its pictures, by their paths in the site; `run`: after a run in build/notebook."""
    notebook = nbformat.read(path, as_version=4)
    if run == "short":
        [sizes] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
        sizes.source = f"sizes = {SHORT}"
    if run:
        folder = ROOT / "build" / "notebook"
        folder.mkdir(parents=True, exist_ok=True)
        NotebookClient(notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    stem = path.relative_to(ROOT).with_suffix("").as_posix()
    parts, pictures = [], {}
    for cell in notebook.cells:
        parts.append(cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![What the cell draws]({Path(name).name})")
            elif "text/markdown" in data:
                parts.append(data["text/markdown"])
            elif output.output_type == "stream" and output.name == "stdout":
                parts.append(f"```text\n{output.text.rstrip()}\n```")
            elif "text/plain" in data:
                parts.append(f"```text\n{data['text/plain']}\n```")
    return {f"{stem}.md": "\n\n".join(parts) + "\n", **pictures}
