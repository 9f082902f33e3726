"""Searches that are killed, find the disk full, or are told to stop: real processes, which go on to the same history."""

import os
import random
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from nursery import Nursery, left, lines, log, wait_for

KILLS = 2


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an algorithm's search that nothing disturbs."""

    root = tmp_path_factory.mktemp("undisturbed")

    @cache
    def run(algorithm: str) -> Path:
        folder = root / algorithm
        assert nursery.search(folder, algorithm) == 0, log(folder)
        return folder

    return run


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ga", "cma_es", "gradient"])
def test_a_search_killed_at_random_moments_is_the_undisturbed_one(nursery, undisturbed, tmp_path, algorithm):
    run, draw = tmp_path / "run", random.Random(f"kills of {algorithm}")
    whole = lines(undisturbed(algorithm))
    moments = sorted(draw.uniform(0, 0.8 * whole) for _ in range(KILLS))
    for number, moment in enumerate(moments):
        pid = nursery.start(run, algorithm, *(["--resume"] if number else []))
        wait_for(run, max(1, int(moment)))
        time.sleep(draw.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        assert nursery.wait(pid) == -signal.SIGKILL, log(run)
    assert nursery.search(run, algorithm, "--resume") == 0, log(run)
    assert left(run) == left(undisturbed(algorithm))
    # Complete: nothing is done, and nothing changes.
    before = {path: path.read_bytes() for path in run.iterdir()}
    if algorithm == "ga":
        assert nursery.search(run, algorithm, "--resume") == 0 and "is complete, nothing was done" in log(run)
        assert {path: path.read_bytes() for path in run.iterdir()} == before


def stop_and_resume(nursery: Nursery, run: Path, algorithm: str, number: int, *flags: str) -> None:
    """Start a search, refuse a second process in its folder, stop it by a signal after the batch, and resume it."""
    wanted = lines(run) + 2
    pid = nursery.start(run, algorithm, *flags)
    wait_for(run, wanted)
    os.kill(pid, signal.SIGSTOP)  # as it is, for as long as the other one takes
    if algorithm == "ga":
        other = run.with_name("other")
        other.symlink_to(run)
        assert nursery.search(other, algorithm, "--resume") == 2
        assert "another process is working in this folder" in log(other)
    os.kill(pid, number)
    os.kill(pid, signal.SIGCONT)
    assert nursery.wait(pid) == 128 + number, log(run)
    said = log(run).splitlines()
    assert sum(line.startswith("ending when the batch") for line in said) == 1 and "Traceback" not in log(run)
    assert said[-1].startswith("interrupted; ") and "--resume" in said[-1]
    assert wanted <= lines(run) and not (run / "results.json").exists()
    assert nursery.search(run, algorithm, "--resume") == 0, log(run)


def test_a_full_disk_and_a_signal_are_one_line_and_no_loss(nursery, undisturbed, tmp_path):
    run, size = tmp_path / "run", (undisturbed("ga") / "history.jsonl").stat().st_size
    assert nursery.search(run, "ga", most_bytes=2 * size // 3) == 2
    errors = [line for line in log(run).splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "File too large" in errors[0] and "--resume" in errors[0] and "Traceback" not in log(run)
    assert (run / "history.jsonl").stat().st_size == 2 * size // 3  # the line that did not fit is there in part
    stop_and_resume(nursery, run, "ga", signal.SIGINT, "--resume")
    assert left(run) == left(undisturbed("ga"))


@pytest.mark.long
def test_a_signal_ends_a_search_by_gradient_after_the_batch(nursery, undisturbed, tmp_path):
    stop_and_resume(nursery, tmp_path / "run", "gradient", signal.SIGTERM)
    assert left(tmp_path / "run") == left(undisturbed("gradient"))
