"""Prompts per second of the scorer: one factor vector on key-value prompts, after compilation.

python experiments/bench_scoring.py --num-pairs 5 --limit 300
"""

import time
from dataclasses import dataclass

import jax
import numpy as np
from grid import run_script

from lpes_jax.models.llama import load
from lpes_jax.scoring import Scorer
from lpes_jax.store.provenance import environment
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.key_value import KeyValue


@dataclass(frozen=True)
class Settings:
    """What to time."""

    model: str = "smollm2-135m-instruct"
    num_pairs: int = 5
    limit: int = 300
    positions: tuple[int, ...] = (0, 25, 50, 75, 100)
    repeats: int = 5
    dtype: str = "auto"
    batch_size: int | None = None


def main(settings: Settings) -> None:
    loaded = load(settings.model, settings.dtype)
    task = KeyValue(settings.num_pairs)
    prompts = [
        task.prompt(example, task_prompts.slot(position, task.num_items), position)
        for example in task.examples("test", settings.limit, 0)
        for position in settings.positions
    ]
    encoded = task_prompts.encode(prompts, loaded.tokenizer, loaded.model.config.max_position_embeddings)
    scorer = Scorer(loaded.model, encoded, batch_size=settings.batch_size)
    ones = np.ones((1, loaded.model.config.num_layers))
    start = time.perf_counter()
    scores = scorer(ones)
    seconds = [time.perf_counter() - start]
    for _ in range(settings.repeats):
        start = time.perf_counter()
        scorer(ones)
        seconds.append(time.perf_counter() - start)
    by_position = scores.correct.reshape(-1, len(settings.positions)).mean(axis=0)
    tokens = sum(len(prompt.ids) + len(prompt.answers[0]) for prompt in encoded)
    weights = sum(leaf.size for leaf in jax.tree.leaves(loaded.model.layers))
    best = float(np.median(seconds[1:]))
    print(environment()["devices"], environment()["versions"])
    print(f"first call {seconds[0]:.1f} s, then {best:.3f} s (median of {settings.repeats}); compiled: {scorer.compilations}")
    print(
        f"{len(encoded) / best:.0f} prompts/s, {tokens / best:.0f} tokens/s ({tokens / len(encoded):.0f} a prompt), "
        f"{2 * weights * tokens / best / 1e12:.0f} TFLOP/s in the layers' products"
    )
    print("accuracy by position", dict(zip(settings.positions, (100 * by_position).round(1).tolist(), strict=True)))


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
