"""Prompts per second with and without shared prefixes, in turn, on key-value or multi-key prompts; also compares the verdicts.

    python experiments/bench_prefixes.py --model tiny-retriever --num-pairs 20 --key-length 8 --queries-per-haystack 5
    python experiments/bench_prefixes.py --model LLAMA-2-7B --num-pairs 50 --queries-per-haystack 5 --limit 40 --dtype bfloat16

For each haystack, `--queries-per-haystack` questions are asked at each of `--positions`. Rounds alternate, so that other load
on the machine affects both. On a CPU, core seconds are timed, which other processes do not lengthen. TFLOP/s are those of the
products with the layers' weights, for the tokens that are computed.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from grid import run_script

from lpes_jax.models.llama import load
from lpes_jax.scores import Scores
from lpes_jax.scoring import Scorer
from lpes_jax.store.provenance import environment
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.niah import Niah


@dataclass(frozen=True)
class Settings:
    """What to time."""

    model: str = "smollm2-135m-instruct"
    task: Literal["kv", "multikey_2", "multikey_3"] = "kv"
    """Key-value pairs, or RULER's needles whose haystack is other needles."""
    num_pairs: int = 50
    """kv: pairs in a prompt."""
    num_lines: int = 100
    """multikey: lines of the haystack."""
    key_length: int | None = None
    queries_per_haystack: int = 5
    answer_opener: str = ' "'
    """'' admits two answers, and scores both."""
    positions: tuple[int, ...] = (0, 50, 100)
    limit: int = 15
    """Questions per position."""
    population: int = 1
    repeats: int = 5
    dtype: str = "auto"
    batch_size: int | None = None
    output: Path | None = None
    """A JSON file for the figures."""


def main(settings: Settings) -> None:
    loaded = load(settings.model, settings.dtype)
    shared = settings.queries_per_haystack
    if settings.task == "kv":
        opener = settings.answer_opener or None
        task: Any = KeyValue(settings.num_pairs, settings.key_length, answer_opener=opener, queries_per_haystack=shared)
    else:
        task = Niah(settings.task, num_lines=settings.num_lines, queries_per_haystack=shared)
    prompts = [
        task.prompt(example, task_prompts.slot(position, task.num_items), position)
        for example in task.examples("test", settings.limit, 0)
        for position in settings.positions
    ]
    encoded = task_prompts.encode(prompts, loaded.tokenizer, loaded.model.config.max_position_embeddings)
    scorers = {
        name: Scorer(loaded.model, encoded, batch_size=settings.batch_size, share_prefixes=shared)
        for name, shared in (("plain", False), ("shared", True))
    }
    factors = np.linspace(1, 1.2, settings.population)[:, None] * np.ones(loaded.model.config.num_layers)
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    scores: dict[str, Scores] = {name: scorer(factors) for name, scorer in scorers.items()}  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in scorers}
    for _ in range(settings.repeats):
        for name, scorer in scorers.items():
            start = clock()
            scorer(factors)
            seconds[name].append(clock() - start)
    tokens = sum(len(prompt.ids) + len(answer) - 1 for prompt in encoded for answer in prompt.answers)
    weights = sum(leaf.size for leaf in jax.tree.leaves(loaded.model.layers))
    figures = {}
    for name, scorer in scorers.items():
        median, pairs = float(np.median(seconds[name])), settings.population * len(encoded)
        computed = settings.population * tokens * (1 - scorer.tokens_saved)
        figures[name] = {
            "prompts_per_second": pairs / median,
            "tokens_saved": scorer.tokens_saved,
            "tflops": 2 * weights * computed / median / 1e12,
            "compilations": scorer.compilations,
        }
        print(
            f"{name:7}{pairs / median:9.2f} prompts/s, {scorer.tokens_saved:6.1%} of the tokens saved, "
            f"{figures[name]['tflops']:.3f} TFLOP/s in the layers' products, compiled: {scorer.compilations}"
        )
    plain, shared = scores["plain"], scores["shared"]
    record = {
        "settings": asdict(settings),
        "machine": environment(),
        "date": time.strftime("%Y-%m-%d"),
        "prompts": len(encoded),
        "tokens_a_prompt": tokens / sum(len(prompt.answers) for prompt in encoded),
        "accuracy": float(plain.correct.mean()),
        "other_verdicts": int((plain.correct != shared.correct).sum()),
        "largest_difference_nats": float(np.abs(plain.log_likelihood - shared.log_likelihood).max()),
        "ratio": figures["shared"]["prompts_per_second"] / figures["plain"]["prompts_per_second"],
        **figures,
    }
    print(
        f"{record['ratio']:.2f} x the prompts/s; {len(encoded)} prompts of {record['tokens_a_prompt']:.0f} tokens, accuracy "
        f"{record['accuracy']:.1%}, {record['other_verdicts']} verdicts differ, log-likelihoods by at most "
        f"{record['largest_difference_nats']:.1e} nats"
    )
    print(record["machine"]["devices"], record["machine"]["versions"])
    if settings.output is not None:
        settings.output.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
