"""Commands in their own processes, which start within a second, and their searches: for tests of processes.

A nursery has imported everything but lpes_jax and forks a process for each command: a start costs a second and not five. Its
processes draw no pictures (the files are empty), compile with few optimisations, and have a compilation cache in common.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax

# On a CPU these compile tiny models in half of the time: no fusion emitters, and each program in one piece by one thread.
# Later versions of XLA lack a flag, and end at flags that they do not know.
QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1" if jax.__version_info__ < (0, 11) else ""
NURSERY = """
import json, os, resource, sys, traceback
import flax.nnx, gguf, jax, jinja2, matplotlib.backends.backend_agg, matplotlib.backends.backend_svg, matplotlib.figure
import optax, rich.progress, safetensors.numpy, scipy.stats, tokenizers, tyro
if sys.argv[1] == "hub":
    sys.modules["torch"] = None  # as in a command: transformers imports no torch
    import transformers
    from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
    del sys.modules["torch"]

matplotlib.figure.Figure.savefig = lambda figure, path, **options: open(path, "wb").close()
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        print(os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1]), flush=True)
        continue
    if child := os.fork():
        print(child, flush=True)
        continue
    code = 1
    try:
        for name, value in job["environment"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(os.open(job["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if job["errors"] else log, 2)
        if job["most_bytes"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["most_bytes"],) * 2)
        exec(job["program"], {"arguments": job["arguments"]})
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
"""
OWN = "from lpes_jax import process; process.take_over(); "  # as `python -m` has it
SEARCH = OWN + "from lpes_jax.search.__main__ import main; raise SystemExit(main(arguments))"
VERB = OWN + "from lpes_jax import cli; process.ended(cli.main(arguments))"
SMALL = [
    *("--num-pairs", 3, "--key-length", 1, "--limit", 4, "--test-limit", 2, "--uniform-candidates", 3),
    *("--population-chunk", 1, "--batch-size", 4, "--search-positions", 0, 100, "--weights", 0.5, 0.5, "--positions", 0, 100),
]
ALGORITHMS = {
    "ga": (
        *("--control-points", 3, "--population-size", 6, "--parents", 3, "--mutations", 4, "--crossovers", 1),
        *("--generations", 3),
    ),
    "cma_es": ("--control-points", 3, "--population-size", 6, "--max-evaluations", 18),
    "gradient": ("--curve", "free", "--steps", 12, "--look-every", 1, "--minibatch-size", 4),
}


class Nursery:
    """Starts commands, and knows the pid and the output file of each. `hub`: has the hub client, with its settings."""

    def __init__(self, model: Path, folder: Path, hub: bool = True):
        self.folder, self.model, self.commands = folder, model, 0
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        cache |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        cache |= {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip()}
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, "hub" if hub else ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | cache,
        )

    def start(self, run: Path, algorithm: str, *more: object, most_bytes: int = 0, **environment: str) -> int:
        """A search with its output in RUN.log."""
        flags = ["--model", self.model, "--algorithm", algorithm, *SMALL, *ALGORITHMS[algorithm], "--output-path", run, *more]
        return self.run(SEARCH, Path(f"{run}.log"), *flags, most_bytes=most_bytes, **environment)

    def run(
        self,
        program: str,
        log: Path,
        *arguments: object,
        errors: Path | None = None,
        most_bytes: int = 0,
        **environment: str | None,
    ) -> int:
        """Start Python code, which sees `arguments`; standard error goes to `errors`, else to `log` too."""
        job = {"program": program, "arguments": list(map(str, arguments)), "log": str(log), "most_bytes": most_bytes}
        return self._ask(job | {"environment": environment, "errors": str(errors or "")})

    def verb(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """`lpes ARGUMENTS`, from its start to its end."""
        self.commands += 1
        out, errors = (self.folder / f"{self.commands}.{name}" for name in ("out", "err"))
        code = self.wait(self.run(VERB, out, *arguments, errors=errors, **environment))
        return subprocess.CompletedProcess(list(map(str, arguments)), code, out.read_text(), errors.read_text())

    def wait(self, pid: int) -> int:
        """The exit code; minus the signal's number for one that was killed."""
        return self._ask({"wait": pid})

    def search(self, run: Path, algorithm: str, *more: object, **rest: int | str) -> int:
        """A search from its start to its end."""
        return self.wait(self.start(run, algorithm, *more, **rest))

    def _ask(self, job: dict) -> int:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


def log(run: Path) -> str:
    return Path(str(run) + ".log").read_text()


def lines(run: Path) -> int:
    history = run / "history.jsonl"
    return history.read_bytes().count(b"\n") if history.exists() else 0


def wait_for(run: Path, count: int) -> None:
    end = time.monotonic() + 600
    while lines(run) < count:
        assert time.monotonic() < end, log(run)
        time.sleep(0.002)


def left(run: Path) -> tuple[object, dict]:
    """The history and factors.json, without times."""
    history = (run / "history.jsonl").read_bytes()
    factors = json.loads((run / "factors.json").read_text())
    del factors["search"]["seconds"]
    if factors["search"]["algorithm"] != "gradient":
        return history, factors
    records = [json.loads(line) for line in history.splitlines()]
    seconds = [record.pop("seconds") for record in records]
    assert seconds == sorted(seconds)  # they go on where the process before ended
    return records, factors
