"""Run a table of the paper, or one of our own comparisons, by name.

    python experiments/run_table.py --list                        # all tables and experiments, with their numbers in the paper
    python experiments/run_table.py table07 --help                # its flags and sizes
    python experiments/run_table.py table07 --model smollm2-135m-instruct --num-pairs 5 --output-path runs/table07
    python experiments/run_table.py table07 --render --output-path runs/table07      # only the tables, from summary.json

A name may be shortened (`population`) or be the number of a table (`7`). A table of searches is a file in specs/, whose entries
`table_spec.Spec` documents: one search runs per cell and seed, in its own folder below --output-path. Finished searches are not
run again, and interrupted ones resume. At the end summary.json is written and, from it, tables.md with the paper's rows beside
ours. Any other name is a script in this folder, which is run with the remaining flags.
"""

import ast
import importlib
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lpes_jax.errors import UserError

HERE = Path(__file__).parent
NUMBER = re.compile(r"(?:Tables?|Figures?) \d+(?: and \d+)?")


def experiments() -> dict[str, tuple[str, str]]:
    """All tables and experiments by name: the number in the paper, if any, and a description."""
    texts = {}
    for path in HERE.glob("specs/*.toml"):
        spec = tomllib.loads(path.read_text(encoding="utf-8"))
        texts[path.stem] = spec["title"], spec["manual"].strip()
    for path in HERE.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        if path.name != "run_table.py" and 'if __name__ == "__main__":' in source:
            manual = ast.get_docstring(ast.parse(source)) or ""
            texts[path.stem] = manual.partition("\n")[0], manual
    found = {}
    for name, (title, manual) in texts.items():
        number = NUMBER.search(title)
        found[name] = (number[0] if number else "", manual.partition("\n")[0])

    def order(name: str) -> tuple[bool, bool, int, str]:
        number = found[name][0]
        return not number, not number.startswith("Table"), int((re.findall(r"\d+", number) or [0])[0]), name

    return {name: found[name] for name in sorted(found, key=order)}


def find(asked: str) -> str:
    """Resolve a full name, the beginning of a name, or the number of a table. Raises UserError for none or several."""
    known = experiments()
    if asked in known:
        return asked
    numbered = re.fullmatch(r"(?:table[ _]?)?0*(\d+)", asked.lower())
    found = [name for name, (number, _) in known.items() if numbered and number == f"Table {numbered[1]}"]
    found = found or [name for name in known if name.startswith(asked)]
    if len(found) != 1:
        what = f"may be {', '.join(found)}" if found else "is not known; --list shows the names"
        raise UserError(f"{asked} {what}")
    return found[0]


def run_spec(name: str, args: Sequence[str]) -> None:
    """Run the table of a file in specs/, or with --render only print its tables."""
    import tyro
    from grid import check_lists, markdown_document, write_tables
    from table_spec import about, flags_type, read_spec

    from lpes_jax.json_files import read_json

    spec = read_spec(name)
    kind, defaults = flags_type(spec)
    s: Any = tyro.cli(kind, default=defaults, args=args, description=spec.manual, prog=f"run_table.py {name}")
    check_lists(s)
    code = importlib.import_module(spec.code)
    if s.render:
        summary = read_json(s.output_path / "summary.json")
        print(markdown_document(spec.title, code.tables(spec, s, summary)))
        return
    command = shlex.join(["python", "experiments/run_table.py", name, *args])
    summary = {"command": command, "about": about(spec, s)} | code.run(spec, s)
    write_tables(s, spec.title, code.tables(spec, s, summary), summary)


def main(argv: Sequence[str]) -> None:
    """Run the command; `argv` (without the program) is a name and its flags, --list or --help."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
    elif argv[0] == "--list":
        for name, (number, what) in experiments().items():
            print(f"{number:<16} {name:<30} {what}")
    else:
        name = find(argv[0])
        if (HERE / "specs" / f"{name}.toml").exists():
            run_spec(name, argv[1:])
        else:
            sys.argv = [str(HERE / f"{name}.py"), *argv[1:]]
            runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
