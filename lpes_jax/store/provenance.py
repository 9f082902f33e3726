"""Where a result comes from: versions, devices, XLA's flags, commit, hashes of the input. Also: does a resumed run match?"""

import os
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from lpes_jax import hosts
from lpes_jax.errors import UserError

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
# Entries of a run's config that are paths. They may change, because the config has the hashes of their contents.
PATHS = (
    *("settings.model", "model.name", "settings.data", "settings.text", "settings.initial_factors"),
    *("settings.factors", "settings.router", "settings.mixture", "settings.data_folder"),
    "settings.other_tasks",
)


def environment() -> dict[str, Any]:
    """Versions, devices, XLA's flags and the source's git commit, for every record."""
    packages = ("lpes-jax", "jax", "jaxlib", "flax", "evosax", "optax", "transformers", "numpy")
    devices = jax.devices()
    return {
        "versions": {package: _version(package) for package in packages},
        "devices": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "deterministic": is_deterministic(),
        "git_commit": _git_commit(),
    }


def is_deterministic() -> bool:
    """Whether XLA gives the same bits in every run of a program. On a CPU it does, on a GPU if XLA_FLAGS ask for it."""
    return jax.default_backend() == "cpu" or DETERMINISTIC in os.environ.get("XLA_FLAGS", "").split()


def check_deterministic(asked: bool) -> None:
    """Raise UserError if `--deterministic` is given but it is too late to set it."""
    if asked and not is_deterministic():
        raise UserError(f"--deterministic: JAX is running already; set XLA_FLAGS={DETERMINISTIC} before Python starts")


def check_resumed(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise UserError if the run in `path` was started with another config; `PATHS` may differ.

    If only its `environment` differs, prints a note on stderr.
    """
    before, now = flat(before), flat(now)
    different = [key for key in sorted({*before, *now} - {*PATHS}) if before.get(key) != now.get(key)]
    elsewhere = [key for key in different if key.startswith("environment.")]
    if refused := [key for key in different if key not in elsewhere]:
        named = " ".join(
            ", ".join(f"{flag_of(key)} {before.get(key)!r:.100} (now {now.get(key)!r:.100})" for key in refused[:4]).split()
        )
        raise UserError(f"--resume: {path} was run with {named}; use the same settings or another --output-path")
    if elsewhere:
        named = ", ".join(f"{flag_of(key)} {before.get(key)!r:.100} (now {now.get(key)!r:.100})" for key in elsewhere)
        print(f"note: {path} was started with {named}; scores may differ in their last digits", file=sys.stderr)


def check_processes(config: dict[str, Any], **more: Any) -> None:
    """Raise UserError in all processes if one has another `config` (except paths and devices) or another `more`."""
    elsewhere = {*PATHS, "environment.git_commit"}
    record = {flag_of(key): value for key, value in flat(config).items() if key not in elsewhere and ".devices." not in key}
    hosts.check_alike(record | {flag_of(f"settings.{name}"): value for name, value in more.items()})


def flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested records; names are joined by dots."""
    found = {}
    for name, value in record.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found


def flag_of(key: str) -> str:
    """The user's name for an entry of a flattened config."""
    if key.startswith("settings."):
        return "--" + key.removeprefix("settings.").replace("_", "-")
    if key.startswith("other_tasks."):
        return "--other-tasks, task " + key.removeprefix("other_tasks.").replace(".", ": ", 1)
    if key.startswith("sha256."):
        name = key.removeprefix("sha256.")
        return {"prompts": "questions", "start": "a start"}.get(name, f"--{name}") + " with sha256"
    return key


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:  # PackageNotFoundError: a source tree on the path, not installed
        return None


@cache
def _git_commit() -> str | None:
    """The commit of the source tree that runs, plus `-dirty` if files were changed; None outside a source tree."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
