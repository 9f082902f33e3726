"""The README's commands, word by word, on a fresh clone: what each takes.

    python experiments/readme_path.py --clone /tmp/stranger --runs 2

Clones this repository, and runs the commands under "Demo" and "Your model" there, one after the other in one shell, then the
Python of "Serve". Nothing is prepared: `make demo` makes the environment, and models are downloaded (with --keep-cache, models and
compiled programs of the user's cache folder are used). Writes what each command took and its largest process's memory to
experiments/results/readme_path/NAME.json, from which the README's table is made (`page_figures.py`).
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = Path(__file__).with_name("results") / "readme_path"
VERSIONS = "import json; from lpes_jax.store.provenance import environment; print(json.dumps(environment()))"


def commands(readme: str) -> list[str]:
    """The commands of the path, in the README's order, each as it stands there without its comment."""
    sections = re.split(r"^## ", readme, flags=re.M)
    found = []
    for title in ("Demo", "Your model"):
        section = next(text for text in sections if text.startswith(f"{title}\n"))
        block = re.search(r"(?:^    .*\n)+", section, re.M)
        assert block is not None, f"no commands under {title}"
        joined = re.sub(r"\\\n\s*", "", block[0])
        found += [line.partition("  #")[0].strip() for line in joined.splitlines()]
    serve = next(text for text in sections if text.startswith("Serve\n"))
    python = re.search(r"```python\n(.*?)```", serve, re.S)
    assert python is not None, "no Python under Serve"
    return [*found, f"python - <<'END'\n{python[1]}END"]


def run(clone: Path, lines: list[str], environment: dict[str, str]) -> list[dict[str, Any]]:
    """Run the commands in one shell, as a reader would. Raises SystemExit at the first that fails."""
    entered, taken = [], []
    for line in lines:
        if line.startswith("source "):
            entered.append(line)
            continue
        print(f"$ {line}", flush=True)
        started = time.monotonic()
        script = "\n".join(["set -e", *entered, line])
        process = subprocess.Popen(["bash", "-c", script], cwd=clone, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
        if code := os.waitstatus_to_exitcode(status):
            sys.exit(f"exit code {code}: {line}")
        taken.append({"command": line, "seconds": round(seconds, 1), "largest_process_gigabytes": round(usage.ru_maxrss / 2**20, 2)})
        print(f"# {taken[-1]['seconds']} s, {taken[-1]['largest_process_gigabytes']} GB", flush=True)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clone", type=Path, required=True, help="a folder that does not exist; /1, /2, ... are made in it")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--keep-cache", action="store_true", help="use the user's cache of models and compiled programs")
    parser.add_argument("--name", default="two_cores", help="of the record")
    given = parser.parse_args()
    runs = []
    for number in range(1, given.runs + 1):
        clone = given.clone / str(number)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        if not given.keep_cache:
            environment["LPES_JAX_CACHE"] = str((clone / "cache").resolve())
        runs.append(run(clone, commands((clone / "README.md").read_text(encoding="utf-8")), environment))
        told = subprocess.run([clone / ".venv/bin/python", "-c", VERSIONS], cwd=clone, check=True, capture_output=True, text=True)
        results = {
            name: json.loads((clone / f"runs/{name}/results.json").read_text(encoding="utf-8"))["methods"] for name in ("demo", "check")
        }
        accuracy = {name: {method: figures["acc,none"] for method, figures in methods.items()} for name, methods in results.items()}
        record = {
            "what": "the README's commands on a fresh clone, in order; seconds of the wall clock, and of the largest process its memory",
            "cpu": cpu(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "kept_cache": given.keep_cache,
            **json.loads(told.stdout),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "load": os.getloadavg()[2],
            "accuracy": accuracy,
            "runs": runs,
        }
        RECORDS.mkdir(parents=True, exist_ok=True)
        (RECORDS / f"{given.name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def cpu() -> str:
    """The name of the CPU."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    return found[1] if found else platform.processor()


if __name__ == "__main__":
    main()
