"""Searches that are killed, find the disk full, or are told to stop: real processes, which go on to the same history.

A nursery has imported everything but lpes_jax and forks a process for each search: a start costs a second and not five.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

NURSERY = """
import json, os, resource, sys, traceback
import flax.nnx, gguf, jax, jinja2, matplotlib.backends.backend_agg, matplotlib.backends.backend_svg, matplotlib.figure
import optax, rich.progress, safetensors.numpy, tokenizers, transformers, tyro
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

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
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        if job["most_bytes"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["most_bytes"],) * 2)
        from lpes_jax.search.__main__ import main

        code = main(job["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
"""
SMALL = [
    *("--num-pairs", 3, "--key-length", 1, "--limit", 4, "--test-limit", 2, "--uniform-candidates", 3),
    *("--population-chunk", 1, "--batch-size", 4, "--search-positions", 0, 100, "--weights", 0.5, 0.5, "--positions", 0, 100),
]
ALGORITHMS = {
    "ga": (
        *("--control-points", 3, "--population-size", 6, "--parents", 3, "--mutations", 4, "--crossovers", 1),
        *("--generations", 6),
    ),
    "cma_es": ("--control-points", 3, "--population-size", 6, "--max-evaluations", 30),
    "gradient": ("--curve", "free", "--steps", 24, "--look-every", 1, "--minibatch-size", 4),
}
KILLS = {"ga": 4, "cma_es": 3, "gradient": 3}


class Nursery:
    """Starts searches; of each it knows the pid and where its output goes."""

    def __init__(self, model: Path, folder: Path):
        self.folder, self.model = folder, model
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        cache |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | cache
        )

    def start(self, run: Path, algorithm: str, *more: object, most_bytes: int = 0) -> int:
        flags = ["--model", self.model, "--algorithm", algorithm, *SMALL, *ALGORITHMS[algorithm], "--output-path", run, *more]
        job = {"arguments": list(map(str, flags)), "log": str(run) + ".log", "most_bytes": most_bytes}
        return self._ask(job)

    def wait(self, pid: int) -> int:
        """The exit code; minus the signal's number for one that was killed."""
        return self._ask({"wait": pid})

    def search(self, run: Path, algorithm: str, *more: object, **limits: int) -> int:
        return self.wait(self.start(run, algorithm, *more, **limits))

    def _ask(self, job: dict) -> int:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def nursery(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(model_folder, tmp_path_factory.mktemp("survival"))
    yield nursery
    nursery.process.communicate()


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery) -> dict[str, Path]:
    runs = {name: nursery.folder / name for name in ALGORITHMS}
    for name, run in runs.items():
        assert nursery.search(run, name) == 0, log(run)
    return runs


def log(run: Path) -> str:
    return Path(str(run) + ".log").read_text()


def lines(run: Path) -> int:
    history = run / "history.jsonl"
    return history.read_bytes().count(b"\n") if history.exists() else 0


def wait_for(run: Path, count: int) -> None:
    end = time.monotonic() + 120
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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_search_killed_at_random_moments_is_the_undisturbed_one(nursery, undisturbed, tmp_path, algorithm):
    run, draw = tmp_path / "run", random.Random(f"kills of {algorithm}")
    whole = lines(undisturbed[algorithm])
    moments = sorted(draw.uniform(0, 0.8 * whole) for _ in range(KILLS[algorithm]))
    for number, moment in enumerate(moments):
        pid = nursery.start(run, algorithm, *(["--resume"] if number else []))
        wait_for(run, max(1, int(moment)))
        time.sleep(draw.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        assert nursery.wait(pid) == -signal.SIGKILL, log(run)
    assert nursery.search(run, algorithm, "--resume") == 0, log(run)
    assert left(run) == left(undisturbed[algorithm])
    # Complete: nothing is done, and nothing changes.
    before = {path: path.read_bytes() for path in run.iterdir()}
    if algorithm == "ga":
        assert nursery.search(run, algorithm, "--resume") == 0 and "is complete, nothing was done" in log(run)
        assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_a_full_disk_is_one_line_and_no_loss(nursery, undisturbed, tmp_path):
    run, size = tmp_path / "run", (undisturbed["ga"] / "history.jsonl").stat().st_size
    assert nursery.search(run, "ga", most_bytes=2 * size // 3) == 2
    errors = [line for line in log(run).splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "File too large" in errors[0] and "--resume" in errors[0] and "Traceback" not in log(run)
    assert (run / "history.jsonl").stat().st_size == 2 * size // 3  # the line that did not fit is there in part
    assert nursery.search(run, "ga", "--resume") == 0, log(run)
    assert left(run) == left(undisturbed["ga"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_search_behind_the_batch_and_a_second_process_is_refused(nursery, undisturbed, tmp_path, number):
    run, algorithm = tmp_path / "run", "gradient" if number == signal.SIGINT else "ga"
    pid = nursery.start(run, algorithm)
    wait_for(run, 2)
    os.kill(pid, signal.SIGSTOP)  # as it is, for as long as the other one takes
    if number == signal.SIGTERM:
        (tmp_path / "other").symlink_to(run)
        assert nursery.search(tmp_path / "other", algorithm, "--resume") == 2
        assert "another process is working in this folder" in log(tmp_path / "other")
    os.kill(pid, number)
    os.kill(pid, signal.SIGCONT)
    assert nursery.wait(pid) == 128 + number, log(run)
    said = log(run).splitlines()
    assert sum(line.startswith("ending when the batch") for line in said) == 1 and "Traceback" not in log(run)
    assert said[-1].startswith("interrupted; ") and "--resume" in said[-1]
    assert 2 <= lines(run) < lines(undisturbed[algorithm])
    assert nursery.search(run, algorithm, "--resume") == 0, log(run)
    assert left(run) == left(undisturbed[algorithm])
