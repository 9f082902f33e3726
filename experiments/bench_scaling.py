"""Prompts per second of a population's evaluation on 1, 2, 4, ... devices of one host, in turn; also compares the scores.

    python experiments/bench_scaling.py --model QWEN --num-pairs 50 --population 32 --limit 20
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python experiments/bench_scaling.py --model tiny-retriever \\
        --num-pairs 5 --key-length 8 --limit 2

Each individual's factors rise over the layers from 1 to its own end, between 1 and 2. Medians of --repeats, after compilation.
"""

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np
from grid import markdown_table, run_script

from lpes_jax.mesh import make_mesh
from lpes_jax.models.llama import load
from lpes_jax.scoring import Scorer
from lpes_jax.store.files import write_json
from lpes_jax.store.provenance import environment
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.key_value import KeyValue


@dataclass(frozen=True)
class Settings:
    """What to time."""

    model: str = "smollm2-135m-instruct"
    num_pairs: int = 50
    key_length: int | None = None
    queries_per_haystack: int = 1
    limit: int = 20
    """Questions, each at three positions."""
    population: int = 32
    repeats: int = 3
    dtype: str = "auto"
    batch_size: int | None = None
    output: Path | None = None
    """A JSON file for the figures."""


def main(s: Settings) -> None:
    loaded = load(s.model, s.dtype)
    task = KeyValue(s.num_pairs, s.key_length, queries_per_haystack=s.queries_per_haystack)
    prompts = [
        task.prompt(example, task_prompts.slot(position, task.num_items), position)
        for example in task.examples("test", s.limit, 0)
        for position in (0, 50, 100)
    ]
    encoded = task_prompts.encode(prompts, loaded.tokenizer, loaded.model.config.max_position_embeddings)
    ends = np.linspace(1, 2, s.population)
    factors = np.array([np.linspace(1, end, loaded.model.config.num_layers) for end in ends], np.float32)
    devices, first, records = jax.devices(), None, []
    for count in (1 << power for power in range(len(devices).bit_length())):
        scorer = Scorer(loaded.model, encoded, batch_size=s.batch_size, mesh=make_mesh(devices=devices[:count]))
        scores = scorer(factors)
        first = first or scores
        seconds = []
        for _ in range(s.repeats):
            begun = time.perf_counter()
            scorer(factors)
            seconds.append(time.perf_counter() - begun)
        records.append(
            {
                "devices": count,
                "seconds": statistics.median(seconds),
                "prompts_a_second": s.population * len(encoded) / statistics.median(seconds),
                "verdicts_changed": int((scores.correct != first.correct).sum()),
                "log_likelihood_difference": float(np.abs(scores.log_likelihood - first.log_likelihood).max()),
            }
        )
    rows = [
        [
            str(record["devices"]),
            f"{record['seconds']:.2f}",
            f"{record['prompts_a_second']:.0f}",
            f"{record['prompts_a_second'] / records[0]['prompts_a_second']:.2f}",
            f"{record['verdicts_changed']} of {s.population * len(encoded)}",
            f"{record['log_likelihood_difference']:.1g}",
        ]
        for record in records
    ]
    header = ["devices", "seconds", "prompts/s", "of one device's", "other verdicts", "log-likelihood differs by"]
    print(environment()["devices"], environment()["versions"])
    print(markdown_table(header, rows))
    if s.output is not None:
        record = {"settings": asdict(s) | {"output": None}, "model": loaded.identity, "scaling": records, **environment()}
        write_json(s.output, record)


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
