"""The time and memory of the README's commands, word by word, on a fresh clone.

    python experiments/readme_path.py --clone /tmp/stranger --runs 2

Clones this repository, and runs the commands under "Demo" and "Your model" there, one after the other in one shell, then the
Python of "Serve". Nothing is prepared: `make demo` makes the environment, and models are downloaded. (With --keep-cache, models
and compiled programs of the user's cache folder are used.) Writes each command's time and its largest process's memory to
experiments/results/readme_path/NAME.json, from which the README's table is made (`page_figures.py`).

    python experiments/readme_path.py --models 0.5B=qwen05.gguf 1.5B=qwen15.gguf

runs doctor and export with random gains on other models, with this Python, and writes more_models.json.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama.checkpoint import open_checkpoint
from lpes_jax.store.provenance import environment

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


def run(clone: Path, lines: list[str], variables: dict[str, str]) -> list[dict[str, Any]]:
    """Run the commands in one shell, as a reader would. Raises SystemExit at the first that fails."""
    entered, taken = [], []
    for line in lines:
        if line.startswith("source "):
            entered.append(line)
            continue
        print(f"$ {line}", flush=True)
        started = time.monotonic()
        script = "\n".join(["set -e", *entered, line])
        process = subprocess.Popen(["bash", "-c", script], cwd=clone, env=variables)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
        if code := os.waitstatus_to_exitcode(status):
            sys.exit(f"exit code {code}: {line}")
        taken.append(
            {"command": line, "seconds": round(seconds, 1), "largest_process_gigabytes": round(usage.ru_maxrss / 2**20, 2)}
        )
        print(f"# {taken[-1]['seconds']} s, {taken[-1]['largest_process_gigabytes']} GB", flush=True)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clone", type=Path, help="a folder that does not exist; /1, /2, ... are made in it")
    parser.add_argument("--models", nargs="*", default=[], help="TITLE=MODEL: measure doctor and export on these")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--keep-cache", action="store_true", help="use the user's cache of models and compiled programs")
    parser.add_argument("--name", default="two_cores", help="of the record")
    given = parser.parse_args()
    if given.models:
        measure_models(dict(model.split("=", 1) for model in given.models))
    if given.clone is None:
        return
    runs = []
    for number in range(1, given.runs + 1):
        clone = given.clone / str(number)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        if not given.keep_cache:
            variables["LPES_JAX_CACHE"] = str((clone / "cache").resolve())
        runs.append(run(clone, commands((clone / "README.md").read_text(encoding="utf-8")), variables))
        told = subprocess.run(
            [clone / ".venv/bin/python", "-c", VERSIONS], cwd=clone, check=True, capture_output=True, text=True
        )
        figures = {
            name: json.loads((clone / f"runs/{name}/results.json").read_text(encoding="utf-8"))["methods"]
            for name in ("demo", "check")
        }
        record = {
            "what": "the README's commands on a fresh clone, in order; memory: of the largest process",
            "kept_cache": given.keep_cache,
            **machine(json.loads(told.stdout)),
            "figures": figures,
            "runs": runs,
        }
        write(given.name, record)


def measure_models(models: dict[str, str]) -> None:
    """doctor, and export of random gains, on models by their titles."""
    found = {}
    for title, model in models.items():
        layers = open_checkpoint(Path(model)).config.num_layers
        gains = np.random.default_rng(0).uniform(0.8, 1.25, layers)
        with tempfile.TemporaryDirectory() as folder:
            LayerFactors(np.ones(layers), gains=gains).save(Path(folder) / "factors.json")
            flags = {"doctor": "", "export": f" --factors {folder}/factors.json --output-path {folder}/out"}
            lines = [f"{sys.executable} -m lpes_jax.{verb} --model {model}{more}" for verb, more in flags.items()]
            taken = run(ROOT, lines, dict(os.environ))
        shown = {verb: {"command": f"python -m lpes_jax.{verb} --model {Path(model).name}"} for verb in flags}
        found[title] = {verb: entry | shown[verb] for verb, entry in zip(flags, taken, strict=True)}
        write("more_models", {"what": "doctor, and export of random gains", **machine(environment()), "models": found})


def machine(software: dict[str, Any]) -> dict[str, Any]:
    """The CPU, the load, the date, and what `environment` says."""
    about = {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_of_15_minutes": os.getloadavg()[2],
    }
    return about | software | {"date": datetime.now(UTC).isoformat(timespec="seconds")}


def write(name: str, record: dict[str, Any]) -> None:
    """Write a record."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def cpu() -> str:
    """The name of the CPU."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    return found[1] if found else platform.processor()


if __name__ == "__main__":
    main()
