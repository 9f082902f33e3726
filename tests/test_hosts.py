"""Two processes over loopback: they make the history of one, whatever happens to them on the way."""

import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from nursery import Nursery, left, lines, log, wait_for
from selection import mostly_long

from lpes_jax.errors import UserError
from lpes_jax.hosts import check_alike, from_first, gather
from lpes_jax.settings.groups import HostSettings, check_hosts

WORK = """
from lpes_jax import process
process.take_over()
import os, time
from dataclasses import dataclass
import jax
from lpes_jax import hosts
from lpes_jax.cli import run_verb
from lpes_jax.mesh import least
from lpes_jax.search.stop import GracefulStop
from lpes_jax.settings import Settings

@dataclass(frozen=True)
class Nothing(Settings):
    pass

def work(nothing):
    me = jax.process_index()
    assert least(2**35 + me) == 2**35 and hosts.gather("x" * me) == ["", "x"] and hosts.from_first(lambda: me) == 0
    with GracefulStop() as stop:
        os.write(2, b"at work\\n")
        while True:
            stop.check()
            time.sleep(0.01)

raise SystemExit(run_verb(Nothing(), work, "", arguments, "work", many_hosts=True))
"""


def flags_of_two() -> list[tuple[object, ...]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return [("--coordinator-address", address, "--num-processes", 2, "--process-id", i) for i in (0, 1)]


def pair(nursery: Nursery, folder: Path, algorithm: str, *more: object, second_flags: tuple[object, ...] = ()) -> list[int]:
    """Two processes of one search. Each has an output path of its own, as on hosts without a file system in common."""
    extra = more, (*more, *second_flags)
    return [nursery.start(folder / str(i), algorithm, *flags, *extra[i]) for i, flags in enumerate(flags_of_two())]


def untroubled(run: Path) -> tuple[object, dict]:
    """The files of a run, without its devices."""
    history, factors = left(run)
    for name in ("devices", "xla_flags"):
        del factors["search"][name]
    return history, factors


def same_as_alone(folder: Path) -> bool:
    """Whether the first process found the same as a single one, and only it wrote and printed."""
    quiet = log(folder / "1")
    only = (folder / "0" / "results.json").exists() and not (folder / "1").exists()
    return untroubled(folder / "0") == untroubled(folder / "alone") and only and "lpes" not in quiet and "prompts" not in quiet


@pytest.mark.long
def test_a_pair_of_which_one_was_killed_finds_what_one_process_finds(nursery, tmp_path):
    assert nursery.search(tmp_path / "alone", "ga") == 0, log(tmp_path / "alone")
    first, second = pair(nursery, tmp_path, "ga")
    wait_for(tmp_path / "0", 2)
    os.kill(second, signal.SIGKILL)
    killed = time.monotonic()
    assert [nursery.wait(first), nursery.wait(second)] == [1, -signal.SIGKILL]
    assert time.monotonic() - killed < 60 and lines(tmp_path / "0") < lines(tmp_path / "alone")
    said = log(tmp_path / "0")
    assert "error: process 1 is gone" in said and "--resume" in said and "Traceback" not in said
    assert [nursery.wait(pid) for pid in pair(nursery, tmp_path, "ga", "--resume")] == [0, 0], log(tmp_path / "0")
    assert same_as_alone(tmp_path)


def test_a_pair_finds_what_one_process_finds(nursery, tmp_path):
    few = "--generations", 1
    single = nursery.start(tmp_path / "alone", "ga", *few)
    assert [nursery.wait(pid) for pid in (single, *pair(nursery, tmp_path, "ga", *few))] == [0, 0, 0], log(tmp_path / "0")
    assert lines(tmp_path / "alone") > 6  # more than the first generation
    assert same_as_alone(tmp_path)


@pytest.mark.long
def test_a_process_says_that_it_waits_for_one_that_stands_still(nursery, tmp_path):
    first, second = pair(nursery, tmp_path, "ga")
    wait_for(tmp_path / "0", 2)
    os.kill(second, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        while "waiting for the other processes, 10 s so far" not in log(tmp_path / "0"):
            assert time.monotonic() - stopped < 25, log(tmp_path / "0")  # JAX gives a silent process up after 40 s
            time.sleep(0.1)
    finally:
        os.kill(second, signal.SIGCONT)
    assert [nursery.wait(first), nursery.wait(second)] == [0, 0], log(tmp_path / "0")


@pytest.mark.long
def test_a_pair_descends_as_one_process_with_two_devices(nursery, tmp_path):
    # A gradient is a sum over the devices, which rounds otherwise on one.
    few = "--steps", 6, "--look-every", 2
    single = nursery.start(tmp_path / "alone", "gradient", *few, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert [nursery.wait(pid) for pid in (single, *pair(nursery, tmp_path, "gradient", *few))] == [0, 0, 0], log(tmp_path / "0")
    assert same_as_alone(tmp_path)


@pytest.mark.parametrize("number", mostly_long([signal.SIGKILL, signal.SIGTERM], signal.SIGKILL))
def test_what_ends_process_0_or_stops_one_ends_the_other(nursery, tmp_path, number):
    logs = [tmp_path / f"{i}.log" for i in (0, 1)]
    pids = [nursery.run(WORK, log, *flags) for log, flags in zip(logs, flags_of_two(), strict=True)]
    end = time.monotonic() + 300
    while not all(log.exists() and "at work" in log.read_text() for log in logs):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(pids[0 if number == signal.SIGKILL else 1], number)
    codes, (first_log, second_log) = [nursery.wait(pid) for pid in pids], [log.read_text() for log in logs]
    if number == signal.SIGTERM:
        assert codes == [128 + signal.SIGTERM] * 2 and first_log.splitlines()[-1] == "interrupted", first_log
    else:  # JAX itself aborts a process that finds its coordinator, process 0, gone: at times before ours has ended
        assert codes[0] == -signal.SIGKILL and codes[1] in (1, -signal.SIGABRT)
        assert "error: process 0 is gone" in second_log
    assert "Traceback" not in first_log + second_log


def test_one_process_s_error_ends_both_with_one_line(nursery, tmp_path):
    pids = pair(nursery, tmp_path, "ga", second_flags=("--limit", 3))
    assert [nursery.wait(pid) for pid in pids] == [2, 2]
    said = log(tmp_path / "0") + log(tmp_path / "1")
    assert said.count("error: ") == 1 and "process 1 has --limit 3 (the first: 4)" in said and "Traceback" not in said
    assert not (tmp_path / "0").exists()


def test_processes_that_do_not_come_are_one_line(nursery, tmp_path):
    flags = "--coordinator-address", "127.0.0.1:9", "--num-processes", 2, "--process-id", 1, "--start-timeout", 1
    assert nursery.search(tmp_path / "run", "ga", *flags) == 2
    assert log(tmp_path / "run").startswith("error: --coordinator-address 127.0.0.1:9: the 2 processes did not all connect")


HERE = HostSettings(coordinator_address="node1:8476", num_processes=2, process_id=1)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (replace(HERE, num_processes=None), "add --num-processes"),
        (HostSettings(process_id=0), "add --coordinator-address and --num-processes"),
        (replace(HERE, process_id=2), "--process-id 2: 2 processes have ids from 0 to 1"),
        (replace(HERE, process_id=-1), "--process-id must be at least 0, got -1"),
        (replace(HERE, num_processes=0), "--num-processes must be at least 1"),
        (replace(HERE, coordinator_address="node1"), "'node1' is not HOST:PORT"),
        (replace(HERE, coordinator_address="node1:http"), "is not HOST:PORT"),
        (replace(HERE, coordinator_address="node1:70000"), "is not HOST:PORT"),
        (replace(HERE, distributed=True), "remove --coordinator-address"),
        (replace(HERE, start_timeout=0), "--start-timeout must be at least 1"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, named):
    with pytest.raises(UserError) as refused:
        check_hosts(flags)
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_one_process_needs_no_others():
    assert not check_hosts(HostSettings()) and check_hosts(HERE) and check_hosts(HostSettings(distributed=True))
    assert gather("x") == ["x"] and from_first(lambda: 3) == 3
    check_alike({"anything": 1})
