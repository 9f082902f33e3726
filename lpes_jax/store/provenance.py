"""Where a result comes from: versions, devices, XLA's flags, the commit, hashes of what was asked. Is a run the one begun?"""

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
# Of a run's config: paths, whose contents decide.
PLACES = (
    *("settings.model", "model.name", "settings.data", "settings.text", "settings.initial_factors"),
    *("settings.factors", "settings.router", "settings.mixture", "settings.data_folder"),
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
    """Does XLA give the same bits for the same program and numbers, in every run? On a CPU always, on a GPU if told to."""
    return jax.default_backend() == "cpu" or DETERMINISTIC in os.environ.get("XLA_FLAGS", "").split()


def check_deterministic(asked: bool) -> None:
    """Raise UserError where `--deterministic` is asked for and can no longer be had."""
    if asked and not is_deterministic():
        raise UserError(f"--deterministic: JAX is running already; set XLA_FLAGS={DETERMINISTIC} before Python starts")


def check_resumed(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise UserError where the run in `path` was begun with another config, but for `PLACES`.

    Where its `environment` alone was another, a line on stderr says so.
    """
    before, now = flat(before), flat(now)
    different = [key for key in sorted({*before, *now} - {*PLACES}) if before.get(key) != now.get(key)]
    elsewhere = [key for key in different if key.startswith("environment.")]
    if refused := [key for key in different if key not in elsewhere]:
        named = " ".join(
            ", ".join(f"{flag_of(key)} {before.get(key)!r:.100} (now {now.get(key)!r:.100})" for key in refused[:4]).split()
        )
        raise UserError(f"--resume: {path} was run with {named}; give the same or another --output-path")
    if elsewhere:
        named = ", ".join(f"{flag_of(key)} {before.get(key)!r:.100} (now {now.get(key)!r:.100})" for key in elsewhere)
        print(f"note: {path} was begun with {named}; scores may differ in their last digits", file=sys.stderr)


def check_processes(config: dict[str, Any], **more: Any) -> None:
    """Raise UserError, in all processes, where one of them has another `config`, but for paths and devices, or `more`."""
    elsewhere = {*PLACES, "environment.git_commit"}
    record = {flag_of(key): value for key, value in flat(config).items() if key not in elsewhere and ".devices." not in key}
    hosts.check_alike(record | {flag_of(f"settings.{name}"): value for name, value in more.items()})


def flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names as one, with dots."""
    found = {}
    for name, value in record.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found


def flag_of(key: str) -> str:
    """What a user calls it."""
    if key.startswith("settings."):
        return "--" + key.removeprefix("settings.").replace("_", "-")
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
    """Of the source tree that this runs from, with `-dirty` behind it where files were changed; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
