"""Commands and their surroundings: signals at any moment, the environment of a shell, flags in a colour terminal."""

import os
import pty
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from nursery import OWN, QUICK, VERB, log

from lpes_jax import process
from lpes_jax.cli import run_verb
from lpes_jax.settings import Settings

READY = "import os; os.write(2, b'ready\\n'); "
EVALUATE = (
    OWN + READY + "from lpes_jax.evaluate.__main__ import main; from lpes_jax import process; process.ended(main(arguments))"
)
SMALL = ("--num-pairs", 3, "--key-length", 1, "--limit", 2, "--positions", 0, 100)


@dataclass(frozen=True)
class Nothing(Settings):
    """No flags."""


def lpes(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lpes_jax." + str(arguments[0]), *map(str, arguments[1:])]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment)


def wait_for_ready(path: Path) -> None:
    end = time.monotonic() + 600
    while not (path.exists() and "ready" in path.read_text()):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("count", [1, pytest.param(6, marks=pytest.mark.long)])
def test_a_signal_at_any_moment_ends_an_evaluation_with_one_line(nursery, tmp_path, count):
    draw = random.Random("moments")
    for number, moment in enumerate([0.0, *(draw.uniform(0, 4) for _ in range(count))]):
        run = tmp_path / str(number)
        pid = nursery.run(EVALUATE, Path(f"{run}.log"), "--model", nursery.model, *SMALL, "--output-path", run)
        wait_for_ready(Path(f"{run}.log"))
        time.sleep(moment)
        os.kill(pid, signal.SIGINT)
        code, said = nursery.wait(pid), log(run)
        if code == 0:  # it was done before
            assert (run / "results.json").exists()
            continue
        assert code == 130 and not run.exists(), said
        assert said.splitlines()[-1] == "interrupted" and "Traceback" not in said and "ignored" not in said


def test_a_signal_ends_even_what_swallows_every_exception(nursery, tmp_path):
    program = OWN + READY + "import time\nwhile True:\n try: time.sleep(300)\n except BaseException: pass"
    pid = nursery.run(program, tmp_path / "a.log")
    wait_for_ready(tmp_path / "a.log")
    os.kill(pid, signal.SIGTERM)
    assert nursery.wait(pid) == 143 and (tmp_path / "a.log").read_text() == "ready\ninterrupted\n"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux which signals a process handles")
@pytest.mark.parametrize("moment", [0.0, pytest.param(0.7, marks=pytest.mark.long)])
def test_a_signal_while_python_imports_is_one_line(moment, tmp_path):
    command = [sys.executable, "-m", "lpes_jax.search", "--preset", "quick", "--output-path", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def handles_sigterm() -> bool:  # not Python's own doing
        status = Path(f"/proc/{process.pid}/status").read_text()
        [mask] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
        return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)

    end = time.monotonic() + 300
    while not handles_sigterm():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.002)
    time.sleep(moment)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)
    assert process.returncode == 130 and said == ("", "interrupted\n") and not (tmp_path / "out").exists()


def test_where_the_process_is_not_ours_a_signal_is_raised(capsys):
    def run(flags: Nothing) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with it ignored
    try:
        assert run_verb(Nothing(), run, "", [], "search") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    "environment, named",
    [
        ({"JAX_PLATFORMS": "cuda,nonsense"}, "JAX_PLATFORMS=cuda,nonsense"),
        ({"JAX_LOG_COMPILES": "banana"}, "JAX_LOG_COMPILES"),
    ],
)
def test_an_environment_that_cannot_work_is_one_line(environment, named):
    done = lpes("doctor", **environment)
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and named in line


def test_an_environment_that_changes_results_is_set_aside(model_folder, tmp_path):
    strange = {"JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_ENABLE_X64": "1", "JAX_DEBUG_NANS": "1", "COLUMNS": "1"}
    strange |= {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "PYTHONIOENCODING": "ascii", "TMPDIR": "/nowhere"}
    strange |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": QUICK}  # compiles faster
    done = lpes("evaluate", "--model", model_folder, *SMALL, "--output-path", tmp_path / "out[v2]", **strange)
    assert done.returncode == 0, done.stderr
    assert "JAX_ENABLE_X64=1" in done.stderr and "Traceback" not in done.stderr
    assert done.stdout.isascii() and "out[v2]" in done.stdout and "+/-" in done.stdout
    assert {"results.json", "results.md", "report.html", "positions.png"} <= set(os.listdir(tmp_path / "out[v2]"))


def test_a_closed_pipe_changes_no_file(nursery, tmp_path):
    closed = "import os; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); os.close(writer); "
    flags = ("--model", nursery.model, *SMALL, "--output-path", tmp_path / "out")
    pid = nursery.run(closed + VERB, tmp_path / "a.log", "evaluate", *flags)
    assert nursery.wait(pid) == 0
    said = (tmp_path / "a.log").read_text()
    assert "prompts/s" in said and "Broken pipe" not in said and "Traceback" not in said
    assert {"results.json", "results.md", "report.html"} <= set(os.listdir(tmp_path / "out"))


def test_a_deleted_working_directory_is_one_line(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    program = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, [sys.executable, '-m', 'lpes_jax.doctor'])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=gone, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )  # fmt: skip
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "working directory is gone" in done.stderr


def test_a_bad_flag_in_a_colour_terminal_is_one_line():
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "lpes_jax.evaluate", "--pairs", "3"]
    environment = os.environ | {"TERM": "xterm-256color", "FORCE_COLOR": "1"}
    process = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=its_end, env=environment)
    os.close(its_end)
    said = b""
    while True:
        try:
            read = os.read(terminal, 4096)
        except OSError:  # how a terminal ends on Linux
            break
        if not read:
            break
        said += read
    os.close(terminal)
    assert process.wait() == 2
    [line] = said.decode().strip().splitlines()
    assert line.startswith("error: Unrecognized options: --pairs") and "\x1b" not in line and "│" not in line


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_a_command_imports_no_torch():
    """As `python -m` does it; a process that is not a command's own keeps its torch."""
    program = """if True:
        import sys
        from lpes_jax import process
        process.import_transformers()
        assert "transformers" not in sys.modules
        process.take_over()
        process.import_transformers()
        from lpes_jax.models.llama import load_tokenizer
        print(load_tokenizer("tiny-retriever").encode("a"), "torch" in sys.modules)
        import torch
        print(torch.ones(1).tolist())
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    ids, ones = done.stdout.splitlines()
    assert ids == "[1, 66] False" and ones == "[1.0]" and "PyTorch" not in done.stderr, done


def test_who_waits_for_others_says_so(monkeypatch, capsys):
    monkeypatch.setattr(process, "_WAIT", 0.01)
    with process.waiting("the other processes at a:1"):
        time.sleep(0.2)
    said = capsys.readouterr().err.splitlines()
    assert said and all(line.startswith("waiting for the other processes at a:1, ") for line in said)
    before = threading.active_count()
    time.sleep(0.1)
    assert capsys.readouterr().err.count("\n") <= 1 and threading.active_count() <= before  # and stops


def test_the_time_of_a_command_counts_from_its_start():
    program = "import sys, time; from lpes_jax import process; process.take_over(); time.sleep(0.3); print(process.started())"
    before = time.time()
    told = float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert before <= told <= time.time() - 0.3
    assert before < process.started()  # in a program that imports lpes_jax: now
