"""The memory that search, profile and `--preset best` will need, from a model's config and the planner, before it is loaded.

    needs = plan(config, weights, itemsize, usable=24 * 2**30, length=2048)

All figures are planned (`lpes_jax.memory`), not measured. A search and a profile adapt their passes to the memory, so they
need room for one prompt beside the weights, and are faster with room for full passes. A step of gradient descent has its
minibatch at once; `--minibatch-size` makes it smaller.
"""

import os
from typing import NamedTuple

import jax

from lpes_jax.memory import layer_weights, planned_pass, planned_step
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.report.tables import ScreenTable
from lpes_jax.settings.search import DEFAULT_WINDOW, preset

_GPU_SHARE = 0.75  # of a card that XLA reserves, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set
_FULL_TOKENS = 2**14  # of a pass that keeps a large GPU busy (`memory.tokens_worth_it`)
_CPU_TOKENS = 2**12
_READ = 64  # tokens of an answer, at most, whose logits are read
GIB = 2**30


class Needs(NamedTuple):
    """What a verb needs, in bytes with the weights.

    Attributes:
        verb: The verb.
        least: With the smallest passes or minibatches.
        full: At full speed, or with the preset's minibatch.
        at_once: Prompts at once that fit; 0: the model does not fit.
        enough: Whether `at_once` is full speed or the preset's minibatch.
    """

    verb: str
    least: int
    full: int
    at_once: int
    enough: bool


def usable_memory(gib: float | None = None) -> int:
    """Bytes that XLA may use: of a card with so many GiB, or of this process's device (of a CPU: all of the host's memory)."""
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", _GPU_SHARE))
    if gib is not None:
        return int(gib * share * GIB)
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33


def plan(
    config: LlamaConfig, weights: int, itemsize: int, usable: int, length: int, *, packed: bool = False, backend: str = "gpu"
) -> list[Needs]:
    """What search, profile and search --preset best need for prompts of `length` tokens.

    Args:
        config: The model's sizes.
        weights: Bytes of its weights (`models.llama.checkpoint.weight_bytes`).
        itemsize: Bytes of a number of its dtype.
        usable: Bytes that may be used.
        length: Tokens of a prompt with its answer.
        packed: Whether weights are packed.
        backend: cpu or gpu.
    """
    busy = max(length, _CPU_TOKENS if backend == "cpu" else _FULL_TOKENS)
    memory = planned_pass(config, itemsize, packed=packed, backend=backend)
    row, full_rows = memory.bytes(length, _READ) - memory.fixed, busy // length
    free = usable - weights
    rows = (free // 2 - memory.fixed) // row  # plans use half of the free memory
    if rows < 1 <= (free - memory.fixed) // row:
        rows = 1
    needs = [
        Needs(
            verb, weights + memory.fixed + row, weights + 2 * (memory.fixed + full_rows * row), max(0, rows), rows >= full_rows
        )
        for verb in ("search", "profile")
    ]
    best = preset("best")
    windows, window = best.text.text_minibatch, min(DEFAULT_WINDOW, config.max_position_embeddings)

    def step(prompts: int) -> int:
        return planned_step(config, itemsize, prompts, length, windows, window, packed=packed, backend=backend)

    wanted = best.gradient.minibatch_size
    fitting = max((prompts for prompts in range(1, wanted + 1) if weights + step(prompts) <= usable), default=0)
    return [*needs, Needs("search --preset best", weights + step(1), weights + step(wanted), fitting, fitting == wanted)]


def plan_table(title: str, needs: list[Needs]) -> ScreenTable:
    """The plan as a table."""
    rows = [(need.verb, _gib(need.least), _gib(need.full), verdict(need)) for need in needs]
    return ScreenTable(title, ("verb", "least GiB", "full speed GiB", "planned, not measured"), rows, right=False)


def verdict(need: Needs) -> str:
    """Whether it fits, in words."""
    if not need.at_once:
        return "does not fit"
    if need.enough:
        return "fits"
    if "best" in need.verb:
        return f"fits with --minibatch-size {need.at_once}"
    return f"fits, {need.at_once:,} prompts at once"


def parameters(config: LlamaConfig) -> int:
    """Weights of a model: its matrices, embedding and head."""
    return layer_weights(config) + config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
