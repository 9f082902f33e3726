"""Shared by all tests: strict dtypes around our own code, tiny models, and the real model if it is present."""

import atexit
import functools
import gc
import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "")  # commands under test keep nothing in the user's folder

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import outer_checks  # noqa: F401 before lpes_jax
import pytest
import selection
from byte_tokenizer import byte_tokenizer
from flax import nnx
from jax._src.interpreters import mlir
from jax.experimental.compilation_cache import compilation_cache
from matplotlib.figure import Figure
from nursery import QUICK, Nursery

from lpes_jax.errors import UserError
from lpes_jax.models import zoo
from lpes_jax.models.llama import Llama, LlamaConfig
from lpes_jax.models.llama.checkpoint import save_llama
from lpes_jax.rope import RopeParameters

ROOT = Path(__file__).resolve().parent.parent


os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip()


DEVICES = ROOT / "tests" / "devices"


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests are imported
    among = [Path(argument.split("::")[0]).resolve().is_relative_to(DEVICES) for argument in config.args]
    selection.FEW = "not long" in config.option.markexpr
    if any(among) and not all(among):
        raise pytest.UsageError("tests/devices needs a session of its own; tests/test_devices.py starts one")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Eight virtual devices are only for tests/devices, which tests/test_devices.py runs."""
    return True if collection_path == DEVICES else None  # named on the command line it is collected nevertheless


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, else one worker ends with them while the others have nothing left."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow and item.path.name not in selection.LONGEST)
    jax.devices()  # XLA has read its flags from here on: processes that tests start are as users have them
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "").replace(QUICK, "").strip()


def pytest_collection_finish() -> None:
    """Torch, transformers and the tests themselves stay: the collector need not look through them again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 50)
    if os.environ.get("PYTEST_XDIST_WORKER"):
        atexit.register(os._exit, 0)  # the reports are sent; JAX would spend seconds on freeing thousands of programs


@pytest.fixture(scope="module", autouse=True)
def one_context_of_a_file() -> Iterator[None]:
    """JAX makes a new MLIR context for each program, which takes as long as the lowering of a small one. A file has one."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(mlir, "make_ir_context"):  # not of JAX's public interface
            patch.setattr(mlir, "make_ir_context", functools.cache(mlir.make_ir_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A program that several tests of this process compile is compiled once: a cache of only this process.

    The processes that tests start find no cache (JAX_COMPILATION_CACHE_DIR above), unless the test gives them one. A cache of
    all processes would save little more: they have few programs in common, and tracing and lowering cost more than compiling.
    To keep a program that is compiled at once costs more than it saves.
    """
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    compilation_cache.reset_cache()  # what was imported may have compiled something, without one


DRAWN = Figure.savefig


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tiny models take longer to compile than to run; only slow tests, and processes of their own, get all optimisations.

    And a third of a tiny search is drawing: pictures are empty files, but in tests marked `pictures`.
    """
    jax.config.update("jax_disable_most_optimizations", item.get_closest_marker("slow") is None)
    Figure.savefig = DRAWN if item.get_closest_marker("pictures") else _not_drawn


def _not_drawn(figure: Figure, path: Path, **options: object) -> None:
    path.write_bytes(b"")


@pytest.fixture(autouse=True)
def strict_dtypes(request: pytest.FixtureRequest) -> Iterator[None]:
    """No silent promotion of dtypes in our own code (evosax's own breaks under this: tests that drive it say `promotes`)."""
    if request.node.get_closest_marker("promotes"):
        yield
    else:
        with jax.numpy_dtype_promotion("strict"):
            yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct's GGUF, downloaded once; without a network and a cache the test is skipped."""
    try:
        return zoo.resolve("smollm2-135m-instruct")
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tiny_config() -> LlamaConfig:
    """A Llama with grouped queries, 3 layers, and as many vocabulary entries as bytes."""
    return LlamaConfig(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=96,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope=RopeParameters(rope_theta=10_000.0),
    )


@pytest.fixture(scope="session")
def tiny_model(tiny_config: LlamaConfig) -> Llama:
    """Random weights, large enough that positions matter, and norms that are not 1."""
    model = Llama(tiny_config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    graph, state = nnx.split(model)
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(state))))
    state = jax.tree.map(lambda leaf: leaf * 6 + 0.1 * jax.random.normal(next(keys), leaf.shape, leaf.dtype), state)
    return nnx.merge(graph, state)


@pytest.fixture(autouse=True)
def tiny_model_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that changes the session's tiny model in place fails: later tests would see another model."""
    if "tiny_model" not in request.fixturenames:
        yield
        return
    model = request.getfixturevalue("tiny_model")
    before = [model.config, *jax.tree.leaves(model)]
    yield
    after = [model.config, *jax.tree.leaves(model)]
    same = len(before) == len(after) and all(old is new for old, new in zip(before, after, strict=True))
    assert same, "the test changed the session's tiny_model in place; let it change nnx.clone(tiny_model)"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Llama) -> Path:
    """The tiny model with a byte tokenizer, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_llama(nnx.clone(tiny_model), folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def nursery(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Starts commands in processes of their own, on the tiny model."""
    nursery = Nursery(model_folder, tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.process.communicate()
