"""Compares searches on one device with the same searches on all devices of a host, and in several processes.

    python experiments/several_gpus.py --model smollm2-135m-instruct --output-path runs/several_gpus
    python experiments/several_gpus.py --model tiny-retriever --platform cpu --num-pairs 5 --key-length 8 --steps 2

Each row of the table is two runs of the same `search` command: one on the first device only, and one on all devices (with
CPUs: two virtual ones), or in one process per device (`--coordinator-address`). The histories are compared line by line.
The seconds of a descent are those between its second and its last line, which excludes compilation; other histories have
none. In `late` the last process starts 25 seconds after the others, in `paused` it stands still for 15 seconds: process 0
must say every ten seconds that it waits. `killed` kills one process in the middle: the others must end by themselves, and
after `--resume` the history must be that of the run that was not killed. Finished runs are not run again; `--only` selects
rows. Runs never overlap.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from grid import markdown_table, run_script

from lpes_jax.errors import UserError
from lpes_jax.factors import read_json
from lpes_jax.store.files import write_json, write_text
from lpes_jax.store.provenance import environment

GRADIENT = ("--algorithm", "gradient", "--curve", "free", "--look-every", "5", "--uniform-candidates", "1")
GENETIC = ("--population-size", "8", "--parents", "4", "--mutations", "6", "--crossovers", "2", "--uniform-candidates", "1")
SHARED = ("--queries-per-haystack", "5")
Row = Literal[
    "gradient", "gradient_shared", "gradient_model_axis", "population_shared", "processes", "late", "paused", "killed"
]


@dataclass(frozen=True)
class Kind:
    """A search, and how its second run differs from the first, which is on one device."""

    flags: tuple[str, ...]
    more: tuple[str, ...] = ()
    processes: bool = False
    pause: float = 0.0
    """Seconds that the last process comes late ("late"), or stands still after the first lines of history ("paused")."""
    first: str | None = None
    """The row whose first run is also the first of this one."""


ROWS: dict[Row, Kind] = {
    "gradient": Kind(GRADIENT),
    "gradient_shared": Kind((*GRADIENT, *SHARED)),
    "gradient_model_axis": Kind(GRADIENT, ("--model-axis", "2"), first="gradient"),
    "population_shared": Kind((*GENETIC, *SHARED)),
    "processes": Kind((*GENETIC, *SHARED), processes=True, first="population_shared"),
    "late": Kind((*GENETIC, *SHARED), processes=True, pause=25, first="population_shared"),
    "paused": Kind((*GENETIC, *SHARED), processes=True, pause=15, first="population_shared"),
    "killed": Kind((*GENETIC, *SHARED), processes=True, first="population_shared"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model and the sizes of the searches."""

    output_path: Path = Path("runs/several_gpus")
    """Folder of the runs, of tables.md and summary.json."""
    model: str = "smollm2-135m-instruct"
    """A name in models/zoo, a folder in Hugging Face layout, a .gguf file, or a Hugging Face hub id."""
    only: tuple[Row, ...] = tuple(ROWS)
    """Rows of the table to run."""
    platform: Literal["gpu", "cpu"] = "gpu"
    """cpu: two virtual devices, to try the script out."""
    devices: int = 2
    """Devices of the host."""
    num_pairs: int = 20
    """kv: pairs in a prompt."""
    key_length: int | None = None
    """kv: hexadecimal characters of keys and values (default: UUIDs)."""
    limit: int = 40
    """Search questions."""
    steps: int = 20
    """Steps of Adam."""
    generations: int = 4
    """Generations of the genetic algorithm."""


def main(s: Settings) -> None:
    """Run missing searches and write the table."""
    s.output_path.mkdir(parents=True, exist_ok=True)
    table: dict[str, dict[str, Any]] = {}
    for name in s.only:
        kind = ROWS[name]
        first = s.output_path / f"{kind.first or name}_one"
        run(s, first, kind.flags, devices=1)
        second, notes = s.output_path / f"{name}_all", ""
        if name == "killed":
            notes = kill_one(s, second, kind.flags)
        elif kind.pause:
            notes = pause_one(s, second, kind, late=name == "late")
        elif kind.processes:
            together(s, second, kind.flags)
        else:
            run(s, second, (*kind.flags, *kind.more), devices=s.devices)
        table[name] = compared(first, second) | {"note": notes}
        print(name, json.dumps(table[name]), flush=True)
    header = [
        "",
        "seconds, one",
        "seconds, all",
        "speed-up",
        "lines",
        "first line apart",
        "all lines apart",
        "factors apart",
        "note",
    ]
    rows = [
        [
            name,
            f"{row['seconds_one']:.1f}",
            f"{row['seconds_all']:.1f}",
            f"{row['seconds_one'] / row['seconds_all']:.2f}" if row["seconds_all"] else "-",
            str(row["lines"]),
            f"{row['first_apart']:.2g}",
            f"{row['fitness_apart']:.2g}",
            f"{row['factors_apart']:.2g}",
            row["note"],
        ]
        for name, row in table.items()
    ]
    origin = environment()
    write_json(s.output_path / "summary.json", {"rows": table, "model": s.model, **origin})
    write_text(s.output_path / "tables.md", f"# One device and {s.devices}\n\n{markdown_table(header, rows)}\n")
    print((s.output_path / "tables.md").read_text())


def compared(first: Path, second: Path) -> dict[str, Any]:
    """The largest differences of the histories of two finished runs, and the seconds of their lines. Raises UserError."""
    single, several = (
        [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()] for folder in (first, second)
    )
    if len(single) != len(several):
        raise UserError(f"{second}: {len(several)} lines of history, and {len(single)} in {first}")

    def apart(name: str) -> float:
        pairs = [(a[name], b[name]) for a, b in zip(single, several, strict=True) if a.get(name) is not None]
        return max((float(np.abs(np.subtract(*pair)).max()) for pair in pairs), default=0.0)

    def seconds(history: list[dict[str, Any]]) -> float:
        return history[-1]["seconds"] - history[1]["seconds"] if "seconds" in history[-1] and len(history) > 2 else 0.0

    return {
        "lines": len(single),
        "first_apart": abs((single[0].get("fitness") or 0) - (several[0].get("fitness") or 0)),
        "fitness_apart": apart("fitness"),
        "factors_apart": apart("factors"),
        "seconds_one": seconds(single),
        "seconds_all": seconds(several),
    }


def command(s: Settings, folder: Path, flags: tuple[str, ...]) -> list[str]:
    """The `search` command of a run."""
    task = ["--num-pairs", str(s.num_pairs)] + ([] if s.key_length is None else ["--key-length", str(s.key_length)])
    sizes = ["--limit", str(s.limit), "--test-limit", "2", "--steps", str(s.steps), "--generations", str(s.generations)]
    left_out = {"--generations"} if "gradient" in flags else {"--steps"}
    kept = [part for pair in zip(sizes[::2], sizes[1::2], strict=True) if pair[0] not in left_out for part in pair]
    start = [sys.executable, "-m", "lpes_jax.search", "--model", s.model, "--output-path", str(folder)]
    return [*start, *task, *kept, *flags]


def variables(s: Settings, devices: int, first: int = 0) -> dict[str, str]:
    """The environment of a process that sees `devices` devices, from the device `first` on."""
    if s.platform == "cpu":
        more = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    else:
        more = {"CUDA_VISIBLE_DEVICES": ",".join(str(first + number) for number in range(devices))}
    return os.environ | more


def run(s: Settings, folder: Path, flags: tuple[str, ...], devices: int) -> None:
    """Run a search in one process, unless it is finished."""
    if (folder / "results.json").exists():
        return
    with (s.output_path / f"{folder.name}.log").open("w") as log:
        done = subprocess.run(command(s, folder, flags), env=variables(s, devices), stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        raise UserError(f"{folder}: the search ended with {done.returncode}; its output is in {folder}.log")


def started(s: Settings, folder: Path, flags: tuple[str, ...], late: float = 0.0) -> list[subprocess.Popen[bytes]]:
    """Start a search in as many processes as there are devices, one device each; the last starts `late` seconds later."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = []
    for number in range(s.devices):
        if number == s.devices - 1:
            time.sleep(late)
        hosts = ("--coordinator-address", address, "--num-processes", str(s.devices), "--process-id", str(number))
        log = (s.output_path / f"{folder.name}.{number}.log").open("a")
        processes.append(
            subprocess.Popen(
                command(s, folder, (*flags, *hosts)), env=variables(s, 1, number), stdout=log, stderr=subprocess.STDOUT
            )
        )
    return processes


def together(s: Settings, folder: Path, flags: tuple[str, ...]) -> None:
    """Run a search in several processes, unless it is finished."""
    if (folder / "results.json").exists():
        return
    codes = [process.wait() for process in started(s, folder, flags)]
    if any(codes):
        raise UserError(f"{folder}: the processes ended with {codes}; their output is in {folder}.*.log")


def pause_one(s: Settings, folder: Path, kind: Kind, *, late: bool) -> str:
    """Start the last process late, or stop it for a while after the first generation. Returns how often process 0 said so."""
    notes = folder.with_suffix(".paused.json")
    if (folder / "results.json").exists():
        return read_json(notes)["note"]
    processes = started(s, folder, kind.flags, kind.pause if late else 0.0)
    if not late:
        wait_for_line(folder, processes)
        processes[-1].send_signal(signal.SIGSTOP)
        time.sleep(kind.pause)
        processes[-1].send_signal(signal.SIGCONT)
    codes = [process.wait() for process in processes]
    if any(codes):
        raise UserError(f"{folder}: the processes ended with {codes}; their output is in {folder}.*.log")
    said = [
        line for line in (s.output_path / f"{folder.name}.0.log").read_text().splitlines() if line.startswith("waiting for")
    ]
    note = f"{kind.pause:.0f} s {'late' if late else 'without a sign'}: process 0 said {len(said)} times that it waits"
    write_json(notes, {"note": note, "said": said})
    return note


def wait_for_line(folder: Path, processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait until the history has a line; returns how many it has."""
    history = folder / "history.jsonl"
    while not history.exists() or not history.read_text():
        if any(process.poll() is not None for process in processes):
            raise UserError(f"{folder}: a process ended too early; its output is in {folder}.*.log")
        time.sleep(0.2)
    return len(history.read_text().splitlines())


def kill_one(s: Settings, folder: Path, flags: tuple[str, ...]) -> str:
    """Kill the last process after the first generation, then resume. Returns how the others ended."""
    if (folder / "results.json").exists():
        return read_json(folder.with_suffix(".killed.json"))["note"]
    processes = started(s, folder, flags)
    lines = wait_for_line(folder, processes)
    processes[-1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    codes = [process.wait() for process in processes]
    note = f"killed after {lines} lines: the others ended with {codes[:-1]} after {time.monotonic() - killed:.0f} s"
    write_json(folder.with_suffix(".killed.json"), {"note": note})
    together(s, folder, (*flags, "--resume"))
    return note


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
