"""XLA's compiled programs: the commands cache them on disk, and they are counted.

Every batch shape of a model is compiled once, which takes seconds on a CPU and up to minutes on a GPU. `keep_programs` lets JAX
write compiled programs to the user's cache folder (`compiled`, beside the downloaded models), where later processes find them.
If the cache exceeds 2 GiB, the least recently used programs are deleted. Commands call `keep_programs`; programs that import
lpes_jax may.

    JAX_COMPILATION_CACHE_DIR=FOLDER ...      another folder; set but empty: no cache
    JAX_ENABLE_COMPILATION_CACHE=false ...    no cache

JAX's other settings are respected too (JAX_COMPILATION_CACHE_MAX_SIZE, ...). A cache key covers the program, the versions,
XLA's flags and the device, so no outdated program is found.

`compilations(since)` counts this process's compilations, for the record of a result.
"""

import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import jax

from lpes_jax.models.zoo import cache_folder

# (JAX's default, which means that the user has set nothing; our value). Size in bytes; the compile time in seconds from which a
# program is written. On a CPU a search compiles a dozen programs of half a second each.
SETTINGS = {
    "jax_compilation_cache_max_size": (-1, 2 * 2**30),
    "jax_persistent_cache_min_compile_time_secs": (1.0, 0.2),
}
# For `jax.jit(compiler_options=...)` of programs dominated by large products. By default XLA writes Triton kernels for these
# and times them against cuBLAS's at each compilation. That took up to half of the compile time, and the kernels were no faster
# (H200s, 7B shape, SmolLM2). A value in XLA_FLAGS takes precedence.
_TRITON = "xla_gpu_enable_triton_gemm"
LARGE_PRODUCTS = {} if _TRITON in os.environ.get("XLA_FLAGS", "") else {_TRITON: False}
_COMPILE = "/jax/core/compile/backend_compile_duration"  # also sent for a program from the cache, after its hit event
_HIT = "/jax/compilation_cache/cache_hits"

_log: list[tuple[float, float, bool]] = []  # when, seconds, found in the cache
_here = threading.local()


def keep_programs(folder: Path | None = None) -> Path | None:
    """Cache compiled programs in a folder from here on.

    A folder configured in JAX takes precedence. If the folder cannot be written, a note is printed on stderr; this is no error.

    Args:
        folder: None means `compiled` in the user's cache folder.

    Returns:
        The folder, or None if nothing is cached.
    """
    chosen = _setting("jax_compilation_cache_dir")
    if not _setting("jax_enable_compilation_cache"):
        return None
    if chosen is not None:
        return Path(chosen) if chosen else None
    folder = folder or cache_folder() / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lockfile", timeout=10):  # the lock that JAX uses
            for program in folder.glob("*-cache"):  # an incomplete write, on which JAX would fail every time
                if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
                    program.unlink()
    except (OSError, NotImplementedError, filelock.Timeout) as error:
        reason = getattr(error, "strerror", None) or error
        print(f"note: {folder}: compiled programs cannot be kept here ({reason})", file=sys.stderr)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, (default, ours) in SETTINGS.items():
        if _setting(name) == default:
            jax.config.update(name, ours)
    return folder


def compile_side_by_side(programs: Sequence[jax.stages.Lowered]) -> None:
    """Compile programs in parallel, one per core and at most 16; later calls of the lowered functions find them.

    If a compilation fails, its error is raised and compilations that have not started are cancelled; Ctrl-C does the same.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(min(len(programs), cores, 16))
    try:
        list(pool.map(lambda program: program.compile(), programs))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def described() -> str:
    """The cache's folder and the number of programs in it, in one line."""
    folder = _setting("jax_compilation_cache_dir")
    if not (folder and _setting("jax_enable_compilation_cache")):
        return "not kept"
    sizes = [path.stat().st_size for path in Path(folder).glob("*-cache")]
    return f"{len(sizes)} kept in {folder}, {sum(sizes) / 2**20:,.0f} MiB"


def compilations(since: float = 0.0) -> dict[str, Any]:
    """Count the programs that this process compiled since a time (of `time.time`), and XLA's seconds; cache hits separately.

    Seconds of parallel compilations are summed.
    """
    compiled = [seconds for when, seconds, found in _log if when >= since and not found]
    found = [seconds for when, seconds, found in _log if when >= since and found]
    return {
        "programs": len(compiled),
        "seconds": round(sum(compiled), 3),
        "from_cache": len(found),
        "seconds_from_cache": round(sum(found), 3),
    }


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


def _on_event(event: str, **_: Any) -> None:
    if event == _HIT:
        _here.hit = True


def _on_duration(event: str, duration_secs: float, **_: Any) -> None:
    if event == _COMPILE:
        _log.append((time.time(), duration_secs, getattr(_here, "hit", False)))
        _here.hit = False


jax.monitoring.register_event_listener(_on_event)
jax.monitoring.register_event_duration_secs_listener(_on_duration)
