"""Compiled programs on disk and in results."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from lpes_jax import compilation
from lpes_jax.compilation import compilations, keep_programs

NAMES = ("jax_compilation_cache_dir", "jax_enable_compilation_cache", *compilation.SETTINGS)


def new_process() -> None:
    """Make JAX forget its compiled programs, and the folder of its cache."""
    jax.clear_caches()
    compilation_cache.reset_cache()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache folder; JAX has been told nothing, and keeps everything however fast it was compiled."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    monkeypatch.setenv("LPES_JAX_CACHE", str(tmp_path))
    monkeypatch.setitem(compilation.SETTINGS, "jax_persistent_cache_min_compile_time_secs", (1.0, 0.0))
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)  # JAX's own
    new_process()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    new_process()


def compiled() -> dict:
    """What it takes to have one program."""
    x = jax.block_until_ready(jnp.ones((4, 4)))
    started = time.time()
    jax.block_until_ready(jax.jit(lambda x: jnp.tanh(x @ x).sum())(x))
    return compilations(since=started)


def test_what_one_process_compiled_the_next_one_finds(home):
    folder = home / "compiled"
    assert keep_programs() == folder == keep_programs() and folder.stat().st_mode & 0o777 == 0o700
    counts = compiled()
    assert counts["programs"] == 1 and counts["seconds"] > 0 and counts["from_cache"] == 0
    programs = list(folder.glob("*-cache"))
    assert compilation.described().startswith(f"{len(programs)} kept in {folder}, ") and programs
    new_process()
    counts = compiled()
    assert (counts["programs"], counts["seconds"], counts["from_cache"]) == (0, 0, 1) and counts["seconds_from_cache"] > 0


def test_a_program_whose_writing_was_cut_off_is_written_anew(home):
    keep_programs()
    compiled()
    for program in (home / "compiled").glob("*-cache"):
        program.write_bytes(program.read_bytes()[:20])
        program.with_name(program.name.removesuffix("cache") + "atime").unlink()
    new_process()
    jax.config.update("jax_compilation_cache_dir", None)
    keep_programs()
    assert compiled()["programs"] == 1  # without a warning, which would be an error here
    new_process()
    assert compiled()["from_cache"] == 1


def test_the_users_choice_stays(home):
    for name, value in (("jax_compilation_cache_dir", str(home / "own")), ("jax_compilation_cache_max_size", 10**6)):
        jax.config.update(name, value)
    assert keep_programs() == home / "own" and jax.config.jax_compilation_cache_max_size == 10**6
    jax.config.update("jax_compilation_cache_dir", "")
    assert keep_programs() is None and compilation.described() == "not kept"
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    assert keep_programs() is None and compiled()["programs"] == 1
    assert not list(home.iterdir())


def test_a_folder_that_cannot_be_written_is_a_note(home, capsys):
    (home / "compiled").write_text("")
    assert keep_programs() is None and jax.config.jax_compilation_cache_dir is None
    assert f"note: {home / 'compiled'}: compiled programs cannot be kept here (File exists)" in capsys.readouterr().err
    assert compiled()["programs"] == 1


def test_commands_keep_programs_and_an_import_does_not(tmp_path):
    chosen = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
    code = "import os, lpes_jax, lpes_jax.search.__main__ as it; print(os.listdir(os.environ['LPES_JAX_CACHE'])); it.main()"
    (tmp_path / "cache").mkdir()
    (tmp_path / "empty").mkdir()  # a model that is refused when it is opened, not before
    done = subprocess.run(
        [sys.executable, "-c", code, "--model", str(tmp_path / "empty"), "--output-path", str(tmp_path / "out")],
        env=chosen | {"LPES_JAX_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[]\n" and str(tmp_path / "empty") in done.stderr
    assert (tmp_path / "cache" / "compiled").is_dir()


@pytest.mark.parametrize(
    ("flags", "wanted"), [("", {"xla_gpu_enable_triton_gemm": False}), ("--xla_gpu_enable_triton_gemm=true", {})]
)
def test_xla_flags_for_large_products_stay(flags, wanted):
    code = "import jax, lpes_jax.compilation as it; jax.devices(); print(it.LARGE_PRODUCTS)"  # XLA ends at an unknown flag
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{wanted}\n", done.stderr
