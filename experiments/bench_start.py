"""Seconds from the command to the first scored prompts of `python -m lpes_jax.search`, by phase.

    python experiments/bench_search.py --write-model FOLDER llama-2-7b smollm2-135m-instruct 0     # a 7B shape, random weights
    python experiments/bench_start.py --model FOLDER --data nq-open-oracle.jsonl.gz
    python experiments/bench_start.py --model FOLDER --data nq-open-oracle.jsonl.gz --cold         # as root, on Linux

Each run is a process with the command's own code, which notes the time when it enters and leaves a function. It ends when the
first prompts go to the device (`--scored`: when they are scored, with what was compiled). `--cold` drops the page cache before
each run. Rows: the end of each phase and its seconds; indented ones are parts of it, or run beside it in threads. Writes
results.json and tables.md into --output-path.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

STARTED = "LPES_BENCH_STARTED"


@dataclass(frozen=True, kw_only=True)
class BenchStartFlags:
    """The model, the data and the number of runs."""

    model: str
    """A folder, file or name, as of search."""
    data: Path
    """nq-open-oracle.jsonl.gz."""
    output_path: Path = Path("runs/bench_start")
    """Folder of results.json and tables.md."""
    limit: int = 200
    """Questions, each at three positions."""
    num_documents: int = 10
    """Documents of a prompt."""
    runs: int = 2
    """Processes, one after another."""
    cold: bool = False
    """Drop the page cache before each run."""
    scored: bool = False
    """Go on until the first prompts are scored."""
    search_flags: str = ""
    """More flags for the search, in one string after an equals sign."""


def main(flags: BenchStartFlags) -> None:
    """Run the processes, and write the table."""
    flags.output_path.mkdir(parents=True, exist_ok=True)
    runs = []
    for _ in range(flags.runs):
        if flags.cold:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
        with tempfile.TemporaryDirectory() as folder:
            runs.append(_run(flags, Path(folder)))
        print(table([runs[-1]]), flush=True)
    record = {
        "flags": {name: str(value) for name, value in asdict(flags).items()},
        "date": time.strftime("%Y-%m-%d"),
        "runs": runs,
    }
    (flags.output_path / "results.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (flags.output_path / "tables.md").write_text(table(runs) + "\n", encoding="utf-8")


def _run(flags: BenchStartFlags, folder: Path) -> list[dict[str, Any]]:
    """The phases of one process."""
    sizes = {
        "limit": flags.limit,
        "population-size": 2,
        "parents": 2,
        "generations": 0,
        "uniform-candidates": 1,
        "test-limit": 1,
    }
    task = {
        "task": "mdqa",
        "data": flags.data,
        "distractors": "random",
        "num-documents": flags.num_documents,
        "metrics": "prefix",
    }
    given = {"model": flags.model, "preset": "paper", "output-path": folder / "run", **sizes, **task}
    words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    command = [sys.executable, __file__, "--child", str(folder / "phases.json"), str(int(flags.scored)), *words]
    environment = os.environ | {STARTED: repr(time.time())}
    done = subprocess.run([*command, *flags.search_flags.split()], env=environment, check=False)
    if not (folder / "phases.json").exists():
        raise SystemExit(f"error: the search ended with code {done.returncode} before it scored")
    return json.loads((folder / "phases.json").read_text(encoding="utf-8"))


def table(runs: list[list[dict[str, Any]]]) -> str:
    """The phases of all runs in Markdown: end and seconds of each run."""
    lines = [
        "| phase | " + " | ".join(f"end {number} | s" for number in range(1, len(runs) + 1)) + " |",
        "| --- |" + " ---: |" * 2 * len(runs),
    ]
    for name in dict.fromkeys(phase["name"] for run in runs for phase in run):
        cells = []
        for run in runs:
            found = [phase for phase in run if phase["name"] == name]
            cells.append(f"{found[-1]['end']:.1f} | {sum(phase['seconds'] for phase in found):.1f}" if found else "|")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def child(path: Path, scored: bool, arguments: list[str]) -> None:
    """The command, with notes of times; ends the process."""
    started = float(os.environ[STARTED])
    phases: list[dict[str, Any]] = []
    last = started

    def note(name: str, begin: float) -> None:
        now = time.time()
        phases.append({"name": name, "end": round(now - started, 2), "seconds": round(now - begin, 2)})

    def phase(name: str) -> None:
        nonlocal last
        note(name, last)
        last = time.time()

    def finish() -> None:
        path.write_text(json.dumps(phases), encoding="utf-8")
        os._exit(0)

    def timed(module: Any, name: str, label: str) -> None:
        function = getattr(module, name)

        def run(*given: Any, **named: Any) -> Any:
            begin = time.time()
            try:
                return function(*given, **named)
            finally:
                beside = threading.current_thread() is not threading.main_thread()
                note(f"- {label}" + (" (a thread)" if beside else ""), begin)

        setattr(module, name, run)

    from lpes_jax import process, search
    from lpes_jax.models import weight_hash

    process.take_over()
    timed(process, "import_jax", "import jax")
    timed(process, "import_transformers", "import transformers")
    timed(process, "check_devices", "devices")
    timed(weight_hash, "_hashed", "sha256 of the files")

    def run_search(settings: Any) -> None:
        begin = time.time()
        from lpes_jax import scoring
        from lpes_jax.models import llama
        from lpes_jax.models.llama import checkpoint
        from lpes_jax.search import algorithms, loop, questions, run

        note("- import the search", begin)
        phase("imports, devices")
        for module, name, label in (
            (checkpoint, "load_llama", "weights"),
            (llama, "_tokenizer", "tokenizer"),
            (algorithms, "make_algorithm", "the algorithm"),
            (questions, "search_prompts", "prompts, and their tokens"),
            (loop, "make_scorer", "plan of the passes"),
            (scoring, "compile_side_by_side", "compile"),
        ):
            timed(module, name, label)
        load = run.load

        def loaded(*given: Any, **named: Any) -> Any:
            result = load(*given, **named)
            phase("load")
            return result

        call = scoring.Scorer.__call__

        def scores(*given: Any, **named: Any) -> Any:
            phase("until the first prompts go to the device")
            if not scored:
                finish()
            return call(*given, **named)

        def prompts(*_: Any) -> None:
            phase("compile, first pass")
            finish()

        run.load = loaded
        scoring.Scorer.__call__ = scores
        progress: Any = loop.SearchProgress
        progress.prompts = prompts
        run.run_search(settings)

    verb_package: Any = search
    verb_package.run_search = run_search
    from lpes_jax.search.__main__ import main as verb

    sys.exit(process.ended(verb(arguments)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), sys.argv[3] == "1", sys.argv[4:])
    else:
        main(tyro.cli(BenchStartFlags, description=__doc__))
