"""Modules import in the order that CONTRIBUTING.md documents, which lists all of them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lpes_jax"


def sources() -> dict[Path, str]:
    """The files of the library, and the module or folder of the list that each belongs to."""
    files = [path for path in PACKAGE.rglob("*.py") if "models" not in path.relative_to(PACKAGE).parts]  # a link
    found = {path: path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in files if path != PACKAGE / "__init__.py"}
    return found | dict.fromkeys((ROOT / "models").rglob("*.py"), "models")


def imported(source: str) -> set[str]:
    """The modules and folders of lpes_jax that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("lpes_jax.")}
    return found


def documented() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    match = re.search(r"## Modules\n.*?```\n(.*?)```", text, flags=re.S)
    assert match is not None
    return [name.rstrip("/") for name in match[1].split()]


def test_imports_are_read_wherever_they_stand():
    source = "import lpes_jax.rope\nfrom lpes_jax import hosts as h\ndef f():\n    from lpes_jax.search.loop import search\n"
    assert imported(source) == {"rope", "hosts", "search"}


def test_every_module_is_listed_and_imports_only_from_above():
    order = documented()
    assert len(set(order)) == len(order)
    wrong = []
    for file, unit in sources().items():
        assert unit in order, f"{file} is not in CONTRIBUTING.md's list of modules"
        for other in imported(file.read_text(encoding="utf-8")) - {unit}:
            if other not in order or order.index(other) > order.index(unit):
                wrong.append(f"{file} imports {other}")
    assert not wrong
