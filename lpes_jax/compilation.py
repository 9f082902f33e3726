"""What XLA compiles: kept on disk by the command lines, and counted.

Every shape of a model's batch is compiled once, for seconds on a CPU and up to minutes on a GPU. `keep_programs` lets JAX write
what was compiled to the user's cache folder, `compiled` beside the downloaded models, where the next process finds it; the
least recently used go where it would hold more than 2 GiB. Commands do that; a program that imports lpes_jax may.

    JAX_COMPILATION_CACHE_DIR=FOLDER ...      keeps it in another folder; set but empty: keeps nothing
    JAX_ENABLE_COMPILATION_CACHE=false ...    keeps nothing

JAX's other settings stand as well where they are set (JAX_COMPILATION_CACHE_MAX_SIZE, ...). A key has the program, the
versions, XLA's flags and the device, so that nothing stale is found.

`compilations(since)` counts what was compiled in this process, for a result's record.
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

# JAX's default, which tells that the user has set nothing else, and ours: bytes, and seconds that are worth a file. On a CPU a
# search compiles a dozen programs of half a second.
SETTINGS = {
    "jax_compilation_cache_max_size": (-1, 2 * 2**30),
    "jax_persistent_cache_min_compile_time_secs": (1.0, 0.2),
}
# For `jax.jit(compiler_options=...)` of programs that are mostly large products: XLA writes Triton kernels for these and times
# them against cuBLAS's whenever it compiles one, up to half of its seconds, and they were no faster (H200s, 7B shape, SmolLM2).
# What XLA_FLAGS say of it stands.
_TRITON = "xla_gpu_enable_triton_gemm"
LARGE_PRODUCTS = {} if _TRITON in os.environ.get("XLA_FLAGS", "") else {_TRITON: False}
_COMPILE = "/jax/core/compile/backend_compile_duration"  # also where a program is found in the cache, then behind a hit
_HIT = "/jax/compilation_cache/cache_hits"

_log: list[tuple[float, float, bool]] = []  # when, seconds, found in the cache
_here = threading.local()


def keep_programs(folder: Path | None = None) -> Path | None:
    """Keep compiled programs in a folder (None: of the user's cache) from here on; the folder, or None where none are kept.

    A folder that JAX has been told stands. One that cannot be written is a note on stderr, and no error.
    """
    chosen = _setting("jax_compilation_cache_dir")
    if not _setting("jax_enable_compilation_cache"):
        return None
    if chosen is not None:
        return Path(chosen) if chosen else None
    folder = folder or cache_folder() / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lockfile", timeout=10):  # JAX's own
            for program in folder.glob("*-cache"):  # one whose writing was cut off, over which JAX would stumble for ever
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
    """Compile programs at once, one for each core and 16 at most; calls of what they were lowered from find them.

    Where one fails its error is raised, and others that have not begun are dropped, as they are by Ctrl-C.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(min(len(programs), cores, 16))
    try:
        list(pool.map(lambda it: it.compile(), programs))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def described() -> str:
    """Where compiled programs are kept, and how many there are, in a line."""
    folder = _setting("jax_compilation_cache_dir")
    if not (folder and _setting("jax_enable_compilation_cache")):
        return "not kept"
    sizes = [path.stat().st_size for path in Path(folder).glob("*-cache")]
    return f"{len(sizes)} kept in {folder}, {sum(sizes) / 2**20:,.0f} MiB"


def compilations(since: float = 0.0) -> dict[str, Any]:
    """Programs that this process compiled since a time (of `time.time`), and XLA's seconds; those found in the cache apart.

    The seconds of programs that were compiled side by side are added up.
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
