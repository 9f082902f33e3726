"""Mutants of the library: one changed operator, constant or index each, and the test that notices.

    python tests/mutants.py draw --seed 22 --count 30     # writes tests/mutants.json
    python tests/mutants.py run FOLDER                    # fills in what kills each, in a copy of the tree in FOLDER
    python tests/mutants.py run FOLDER --only 3 17        # these alone

A mutant is a line of a file before and after. `run` looks for the line near where it was drawn, so that the list outlives edits
of other lines, and runs the tests of `FILES` with `-x` and the markers of `make test`. A mutant that no test kills may mean the
same.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("mutants.json")
SHARED = "tests/test_prefixes.py tests/test_scoring.py tests/search/test_racing.py tests/search/test_golden_history.py"
RESUMED = (
    "tests/search/test_golden_history.py tests/search/test_loop.py tests/robust/test_json.py"
    " tests/search/test_strategies.py tests/search/test_survival.py"
)
FILES = {  # the tests that know each file, the cheapest first
    "lpes_jax/rope.py": "tests/test_rope.py tests/methods/test_tables.py tests/test_gains.py tests/models/test_model.py",
    "lpes_jax/scoring.py": f"{SHARED} tests/search/test_loop.py tests/robust/test_not_finite.py tests/test_devices.py",
    "lpes_jax/plan.py": f"tests/test_plan.py {SHARED}",
    "lpes_jax/search/genetic.py": "tests/search/test_golden_history.py tests/search/test_genetic.py tests/search/test_loop.py",
    "lpes_jax/prefixes.py": f"{SHARED} tests/search/test_loop.py",
    "lpes_jax/search/loop.py": f"{RESUMED} tests/test_cli.py",
    "lpes_jax/store/run_folder.py": RESUMED,
    "lpes_jax/store/provenance.py": f"{RESUMED} tests/test_hosts.py",
    "models/llama/gguf.py": "tests/models/test_gguf.py tests/models/test_gguf_model.py tests/models/test_tokenizer.py",
    "models/llama/gguf_model.py": (
        "tests/models/test_gguf_keys.py tests/models/test_gguf_model.py tests/models/test_checkpoint.py"
    ),
}
OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|"),
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip


def nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations, and f-strings, whose parts have no places of their own in Python 3.11."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        for name, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            if name not in ("annotation", "returns"):
                stack += [child for child in children if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr)]


def changes(source: str) -> list[tuple[int, str, str]]:
    """Line numbers from 0, and the lines before and after, of all mutants of a file."""
    lines, found = source.splitlines(), []

    def between(left: ast.expr, right: ast.expr, before: str, after: str) -> None:
        if left.end_lineno != right.lineno:
            return
        number, start, end = right.lineno - 1, left.end_col_offset, right.col_offset
        line = lines[number]
        if len(line.encode()) == len(line) and before in line[start:end]:
            found.append((number, line, line[:start] + line[start:end].replace(before, after, 1) + line[end:]))

    for node in nodes_that_run(ast.parse(source)):
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            between(node.left, node.right, *OPERATORS[type(node.op)])
        elif isinstance(node, ast.Compare):
            for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                if type(operator) in OPERATORS:
                    between(left, right, *OPERATORS[type(operator)])
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                between(left, right, *OPERATORS[type(node.op)])
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            number, start, end = node.lineno - 1, node.col_offset, node.end_col_offset
            line = lines[number]
            after = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            if len(line.encode()) == len(line):
                found.append((number, line, line[:start] + after + line[end:]))
    return sorted(set(found))


def draw(seed: int, count: int) -> list[dict]:
    """Equally many mutants of each file; each line at most once."""
    rng, drawn = random.Random(seed), []
    for number, file in enumerate(FILES):
        share = count // len(FILES) + (number < count % len(FILES))
        candidates = changes((ROOT / file).read_text())
        rng.shuffle(candidates)
        by_line = {line: (line, before, after) for line, before, after in candidates}
        for line, before, after in list(by_line.values())[:share]:
            drawn.append({"file": file, "line": line + 1, "before": before.strip(), "after": after.strip()})
    return drawn


def mutate(source: str, mutant: dict) -> str:
    lines = source.splitlines(keepends=True)
    same = [number for number, line in enumerate(lines) if line.strip() == mutant["before"]]
    if not same:
        raise SystemExit(f"{mutant['file']} has no line any more: {mutant['before']}")
    number = min(same, key=lambda number: abs(number + 1 - mutant["line"]))
    lines[number] = lines[number].replace(mutant["before"], mutant["after"])
    return "".join(lines)


def run(mutant: dict, tree: Path, seconds: float) -> dict:
    """The mutant with what killed it: a test, `timeout`, or None."""
    path, tests = tree / mutant["file"], FILES[mutant["file"]].split()
    whole, started = path.read_text(), time.monotonic()
    path.write_text(mutate(whole, mutant))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *dict.fromkeys(tests)]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        killer = failed[1] if failed else None if done.returncode == 0 else done.stdout[-300:] + done.stderr[-300:]
    except subprocess.TimeoutExpired:
        killer = "timeout"
    finally:
        path.write_text(whole)
    return mutant | {"killed_by": killer, "seconds": round(time.monotonic() - started)}


def main() -> None:
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers(dest="verb", required=True)
    draw_flags, run_flags = verbs.add_parser("draw"), verbs.add_parser("run")
    draw_flags.add_argument("--seed", type=int, default=22)
    draw_flags.add_argument("--count", type=int, default=30)
    run_flags.add_argument("folder", type=Path)
    run_flags.add_argument("--only", type=int, nargs="*")
    run_flags.add_argument("--timeout", type=float, default=900)
    flags = parser.parse_args()
    if flags.verb == "draw":
        LIST.write_text(json.dumps(draw(flags.seed, flags.count), indent=1) + "\n")
        return
    tree, mutants = flags.folder / "tree", json.loads(LIST.read_text())
    if not tree.exists():
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs", ".hypothesis", ".pytest_cache")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    for number in flags.only or range(len(mutants)):
        mutants[number] = run(mutants[number], tree, flags.timeout)
        print(number, mutants[number]["file"], mutants[number]["killed_by"], flush=True)
        LIST.write_text(json.dumps(mutants, indent=1) + "\n")


if __name__ == "__main__":
    main()
