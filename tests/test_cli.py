"""The commands as users run them: real processes, their exit codes, and their files.

A search and a mistake start from nothing, as a user's do; the other processes come from the nursery.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from nursery import QUICK
from schemas import check_folder

from lpes_jax.cli import run_verb
from lpes_jax.factors import LayerFactors
from lpes_jax.settings import Settings


@dataclass(frozen=True)
class Message(Settings):
    """Of a fault."""

    text: str = ""


def lpes(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lpes_jax." + str(arguments[0]), *map(str, arguments[1:])]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment)


SMALL = (
    *("--num-pairs", 3, "--key-length", 2, "--limit", 2, "--test-limit", 2, "--control-points", 3, "--population-size", 4),
    *("--parents", 2, "--mutations", 2, "--crossovers", 1, "--generations", 1, "--uniform-candidates", 2),
)

QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": QUICK}  # compiles faster


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("search") / "run"
    return folder, lpes("search", "--model", model_folder, *SMALL, "--output-path", folder, **QUICKLY)


def test_search_leaves_its_folder_and_prints_its_table(searched):
    folder, done = searched
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "history.jsonl", "uniform.json", "factors.json", "results.json", "results.md", "samples.jsonl"),
        *("positions.png", "positions.svg", "factors.png", "factors.svg", "history.png", "history.svg", "report.html"),
    }
    for word in ("plain prompt", "baseline", "uniform", "pi", "lpes", "100 %", "±", "prompts scored"):
        assert word in done.stdout
    assert "generation 1/1" in done.stderr and "prompts/s" in done.stderr and "left" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr  # plain lines without a terminal
    factors = LayerFactors.load(folder / "factors.json")
    assert factors.factors.shape == (3,) and factors.granularity == "layer"
    assert factors.model["num_layers"] == 3 and len(factors.model["sha256"]) == 64
    assert factors.search["search_space"] == {"paper": str((3 * 31) ** 3), "valid": str(31**3), "brute_force": str(31**3)}
    results = json.loads((folder / "results.json").read_text())
    accuracy, stderr = (results["results"]["kv"][name] for name in ("acc_by_position", "acc_stderr_by_position"))
    assert accuracy.keys() == stderr.keys() == {"0", "25", "50", "75", "100"}
    assert all(stderr[p] == pytest.approx((accuracy[p] * (1 - accuracy[p]) / (2 - 1)) ** 0.5) for p in accuracy)
    assert list(results["methods"]) == ["plain prompt", "baseline", "uniform", "pi", "lpes"]
    assert results["n-samples"] == {"kv": {"original": 2, "effective": 2}}
    assert {"versions", "date", "total_evaluation_time_seconds", "config"} <= results.keys()
    assert results["compilations"]["programs"] > 0 and results["compilations"]["seconds"] > 0
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 5 * 2 * 5
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert len(history) == 4 + 4
    pi = LayerFactors.load(folder / "factors.json").factors.mean()
    assert 0.5 <= pi <= 2.0
    check_folder(folder, "config.json", "history.jsonl", "uniform.json", "factors.json", "results.json", "samples.jsonl")


def test_a_complete_run_is_left_alone_and_one_with_factors_of_fewer_individuals_is_finished(
    searched, nursery, model_folder, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(searched[0], folder)
    command = ("search", "--model", model_folder, *SMALL, "--output-path", folder, "--resume")
    results = (folder / "results.json").read_bytes()
    done = nursery.verb(*command)
    assert done.returncode == 0 and "is complete, nothing was done" in done.stdout + done.stderr, done.stderr
    assert (folder / "results.json").read_bytes() == results
    factors = json.loads((folder / "factors.json").read_text())
    assert factors["search"]["individuals"] == 8
    (folder / "factors.json").write_text(json.dumps(factors | {"search": factors["search"] | {"individuals": 7}}))
    done = nursery.verb(*command)
    assert done.returncode == 0 and "nothing was done" not in done.stdout + done.stderr, done.stderr
    assert json.loads((folder / "factors.json").read_text())["search"]["individuals"] == 8
    assert (folder / "results.json").read_bytes() != results  # its date


@pytest.mark.long
def test_eight_devices_find_what_one_finds(searched, nursery, model_folder, tmp_path):
    flags = ("search", "--model", model_folder, *SMALL, "--output-path", tmp_path / "run")
    done = nursery.verb(*flags, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "results.json").read_text())["devices"]["count"] == 8
    one, eight = (
        [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        for folder in (searched[0], tmp_path / "run")
    )
    for a, b in zip(one, eight, strict=True):
        assert a["log_likelihood"] == pytest.approx(b.pop("log_likelihood"), abs=2e-4)
        assert a["fitness"] == pytest.approx(b.pop("fitness"), abs=1e-5)
        assert b.items() <= a.items()


def test_evaluate_takes_the_factors_and_measures_both_metrics(searched, nursery, model_folder, tmp_path):
    folder, _ = searched
    flags = ("--model", model_folder, "--num-pairs", 3, "--key-length", 2, "--limit", 2, "--max-new-tokens", 4)
    done = nursery.verb("evaluate", *flags, "--factors", folder / "factors.json", "--output-path", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    check_folder(tmp_path / "out", "results.json", "samples.jsonl")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["methods"]) == ["plain prompt", "baseline", "factors"]
    for figures in results["methods"].values():
        assert figures["metric"] == "prefix" and 0 <= figures["substring,none"] <= 1
        assert figures["substring_but_not_prefix"] >= 0 and figures["prefix_differs_from_generation"] == 0
    assert "answers that substring accepts and prefix does not" in done.stdout
    first = json.loads((tmp_path / "out" / "samples.jsonl").read_text().splitlines()[0])
    assert {"method", "prompt_hash", "target", "prefix", "substring", "output", "slot"} <= first.keys()


@pytest.mark.long
def test_an_evaluation_gives_the_same_twice(searched, nursery, model_folder, tmp_path):
    flags = ("--model", model_folder, "--num-pairs", 3, "--key-length", 2, "--limit", 2, "--max-new-tokens", 4)
    for name in ("out", "again"):
        done = nursery.verb("evaluate", *flags, "--factors", searched[0] / "factors.json", "--output-path", tmp_path / name)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "again" / "samples.jsonl").read_bytes() == (tmp_path / "out" / "samples.jsonl").read_bytes()


@pytest.mark.promotes
def test_slots_can_be_named(model_folder, tmp_path):
    from lpes_jax.cli import main

    flags = ("--num-pairs", 3, "--key-length", 2, "--limit", 1, "--metrics", "prefix", "--slots", 1, 2)
    assert main([str(argument) for argument in ("evaluate", "--model", model_folder, *flags, "--output-path", tmp_path)]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["results"]["kv"]["slots"] == [1, 2]


def mistakes(tmp_path: Path, model: Path) -> dict[str, tuple[tuple[object, ...], str]]:
    """Name -> the command, and what its error must name."""
    wrong_layers = tmp_path / "wrong.json"
    search, evaluate = ("search", "--model", model, *SMALL), ("evaluate", "--model", model, "--num-pairs", 3)
    return {
        "missing folder": (("search", "--model", tmp_path / "nowhere"), "nowhere"),
        "unknown task": ((*search, "--task", "kw"), "kv"),
        "unknown flag": ((*search, "--pairs", 3), "--pairs"),
        "unknown preset": ((*search, "--preset", "papper"), "papper"),
        "not a number": ((*search, "--num-pairs", "many"), "--num-pairs"),
        "no pairs": ((*search, "--num-pairs", 0), "--num-pairs"),
        "no examples": ((*search, "--limit", 0), "--limit"),
        "no held-out examples": ((*search, "--test-limit", 0), "--test-limit"),
        "more parents than individuals": ((*search, "--parents", 9), "--parents"),
        "crossed bounds": ((*search, "--min-factor", 2, "--max-factor", 1), "--min-factor"),
        "start outside the bounds": ((*search, "--initial-factor", 3), "--initial-factor"),
        "more control points than layers": ((*search, "--control-points", 9), "--control-points"),
        "weights": ((*search, "--weights", 1, 1, 1), "--weights"),
        "position": ((*search, "--positions", 101), "--positions"),
        "prompt longer than the window": ((*search, "--num-pairs", 40), "--num-pairs"),
        "nothing to resume": ((*search, "--resume"), "config.json"),
        "factors of another model": ((*evaluate, "--factors", wrong_layers), "7 layers"),
        "no factors file": ((*evaluate, "--factors", tmp_path / "no.json"), "no.json"),
        "factors that are none": ((*evaluate, "--factors", model / "config.json"), "lpes-factors/2"),
        "too few new tokens": ((*evaluate, "--limit", 1, "--key-length", 4, "--max-new-tokens", 1), "--max-new-tokens"),
        "missing data": ((*evaluate, "--data", tmp_path / "no.jsonl"), "no.jsonl"),
    }


MISTAKES = list(mistakes(Path(), Path()))


@pytest.mark.promotes
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(mistake, model_folder, tmp_path, capfd):
    from lpes_jax.cli import main

    LayerFactors(np.ones(7)).save(tmp_path / "wrong.json")
    arguments, named = mistakes(tmp_path, model_folder)[mistake]
    out = tmp_path / "out"
    code = main([str(argument) for argument in (*arguments, "--output-path", out)])
    captured = capfd.readouterr()
    assert code == 2
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and named in errors[0]
    assert "Traceback" not in captured.err
    assert not out.exists() or not any(out.iterdir())


def test_a_mistake_in_a_real_process(tmp_path):
    done = lpes("search", "--model", tmp_path / "nowhere")
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and done.stderr.startswith("error: ")


def test_a_run_is_not_overwritten(searched, model_folder, capfd):
    from lpes_jax.cli import main

    folder, _ = searched
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    arguments = ["search", "--model", model_folder, *SMALL, "--output-path", folder]
    assert main([str(argument) for argument in arguments]) == 2 and "--resume" in capfd.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_full_device_is_one_line_and_other_faults_are_tracebacks(capsys, monkeypatch):
    def run(flags: Message) -> None:
        raise jax.errors.JaxRuntimeError(flags.text)

    def main(message: str) -> int:
        return run_verb(Message(message), run, "", [], "search")

    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert main("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.") == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "memory is full" in line
        on_gpu = "nvidia-smi" in line and "XLA_PYTHON_CLIENT_PREALLOCATE=false" in line
        assert on_gpu if backend == "gpu" else "nvidia" not in line and "XLA" not in line
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        main("INTERNAL: no kernel")


@pytest.mark.parametrize("verb", ["search", "evaluate"])
def test_help_has_examples(capsys, verb):
    from lpes_jax.cli import main

    assert main([verb, "--help"]) == 0
    said = capsys.readouterr().out
    assert "Examples:" in said and "--output-path" in said


def test_the_console_script_knows_the_verbs(capsys):
    from lpes_jax.cli import main

    assert main(["--help"]) == 0 and "search" in capsys.readouterr().out
    assert main(["serch"]) == 2 and "search" in capsys.readouterr().err
