"""One generation of the paper's search by the command, in GPU-seconds (Table 10): 20 individuals x 200 questions x 3 positions.

    python experiments/bench_search.py --shape llama-2-7b --data nq-open-oracle.jsonl.gz
    python experiments/bench_search.py --data nq-open-oracle.jsonl.gz --search-flags="--queries-per-haystack 5" --name shared

First a model of the shape with random weights, and the tokenizer of --tokenizer, is written to --folder (13.5 GB for a 7B
shape); an existing one is reused. Then `python -m lpes_jax.search` runs on prompts of 10 documents. The figure is its
wall-clock time, from the start of the process to its end, times the number of GPUs. It includes loading, tokenising, compiling,
host time, writing, and the prompts of one uniform factor and one held-out question.

The paper's Table 10 has four rows. The other three are timed here, after compilation: the factors of 20 individuals from their
curves, and the GA's mutations and crossovers (`ask` with only one of the two).
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the search needs the memory

import json  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, Literal  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
from grid import markdown_table, run_script  # noqa: E402
from table05_latency import config_of, random_model  # noqa: E402

from lpes_jax.curves import bezier  # noqa: E402
from lpes_jax.models.llama import load_tokenizer  # noqa: E402
from lpes_jax.models.llama.checkpoint import save_llama  # noqa: E402
from lpes_jax.search.genetic import PaperGA  # noqa: E402
from lpes_jax.search.lattice import Lattice  # noqa: E402
from lpes_jax.settings.search import preset  # noqa: E402
from lpes_jax.store.files import write_json  # noqa: E402
from lpes_jax.store.provenance import environment  # noqa: E402

PAPER = {"factors from curves": 5.2, "mutation": 4.5, "crossover": 2.3, "inference": 1167.4}  # seconds on 4 H100s
PAPER_GPUS = 4


@dataclass(frozen=True)
class Settings:
    """Sizes and data."""

    data: Path
    """nq-open-oracle.jsonl.gz."""
    shape: Literal["llama-2-7b", "llama-2-13b", "qwen2.5-7b"] = "llama-2-7b"
    tokenizer: str = "smollm2-135m-instruct"
    """A model whose tokenizer the random model gets; the embedding has one row per id."""
    folder: Path = Path("runs/bench_search")
    """Folder of the model, the run and the figures."""
    name: str = "run"
    """Name of the run and its figures in that folder."""
    individuals: int = 20
    limit: int = 200
    """Questions, each at three positions."""
    num_documents: int = 10
    layers: int | None = None
    """A smaller number of layers, for trials."""
    search_flags: str = ""
    """More flags for the search, in one string after an equals sign."""


def main(s: Settings) -> None:
    """Write the model in a separate process, which leaves the GPU's memory to the search, then time the search."""
    model = s.folder / s.shape
    if not (model / "config.json").exists():
        subprocess.run(
            [sys.executable, __file__, "--write-model", str(model), s.shape, s.tokenizer, str(s.layers or 0)], check=True
        )
    run = s.folder / s.name
    sizes = {"limit": s.limit, "population-size": s.individuals, "generations": 0, "uniform-candidates": 1, "test-limit": 1}
    task = {"task": "mdqa", "data": s.data, "distractors": "random", "num-documents": s.num_documents, "metrics": "prefix"}
    flags = {"model": model, "preset": "paper", "output-path": run, "parents": min(12, s.individuals), **sizes, **task}
    command = [
        sys.executable,
        "-m",
        "lpes_jax.search",
        *(str(argument) for name, value in flags.items() for argument in (f"--{name}", value)),
    ]
    start = time.perf_counter()
    search_environment = {name: value for name, value in os.environ.items() if name != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    subprocess.run([*command, *s.search_flags.split()], check=True, env=search_environment)
    seconds = time.perf_counter() - start
    operations = time_operations(num_layers(model), s.individuals)
    gpus = len(jax.devices())
    search = json.loads((run / "factors.json").read_text(encoding="utf-8"))["search"]
    prompts = s.individuals * s.limit * 3
    record = {
        "shape": s.shape,
        "prompts": prompts,
        "search_flags": s.search_flags,
        "command_seconds": seconds,
        "search_seconds": search["seconds"],
        "gpus": gpus,
        "gpu_seconds": seconds * gpus,
        "operations": operations,
        "paper": PAPER | {"gpus": PAPER_GPUS},
        **environment(),
        "date": time.strftime("%Y-%m-%d"),
    }
    rows = [[name, f"{1e3 * value:.2f} ms", f"{PAPER[name]:.1f} s"] for name, value in operations.items()]
    rows += [
        [
            "inference, and all else of the command",
            f"{seconds:.0f} s x {gpus} GPU",
            f"{PAPER['inference']:.0f} s x {PAPER_GPUS} GPUs",
        ],
        ["GPU-seconds", f"{seconds * gpus:.0f}", f"{PAPER['inference'] * PAPER_GPUS:,.0f}"],
        [
            "milliseconds a prompt and GPU",
            f"{1e3 * seconds * gpus / prompts:.1f}",
            f"{1e3 * PAPER['inference'] * PAPER_GPUS / 12000:.0f}",
        ],
    ]
    print(record["devices"], record["versions"])
    print(markdown_table([f"{s.individuals} individuals x {s.limit} questions x 3", "ours", "paper"], rows))
    write_json(s.folder / f"{s.name}.json", record)


def num_layers(model: Path) -> int:
    """The number of layers of a model's folder."""
    return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])


def time_operations(layers: int, individuals: int) -> dict[str, float]:
    """Seconds of Table 10's first three rows, after compilation."""
    key, settings = jax.random.key(0), preset("paper")
    lattice = Lattice(layers, space=settings.space)
    ga = PaperGA(lattice, settings.ga)
    genes, _ = ga.initial_population(key, ga.default_params)
    genes = np.asarray(genes)[:individuals]
    at_layers = jax.jit(jax.vmap(lambda points: bezier(points, layers)))
    seconds = {"factors from curves": median(lambda: at_layers(ga.control_points(genes)))}
    for name, only in (("mutation", {"crossovers": 0}), ("crossover", {"mutations": 0})):
        ga = PaperGA(lattice, replace(settings.ga, **only))
        params = ga.default_params
        population, _ = ga.initial_population(key, params)
        state = ga.init(key, population, jax.random.normal(key, (len(population),)), params)
        seconds[name] = median(lambda ga=ga, state=state, params=params: ga.ask(key, state, params))
    return seconds


def median(run: Callable[[], Any], rounds: int = 20) -> float:
    """The median seconds of a run, after one warm-up."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:]))


def write_model(folder: Path, shape: Literal["llama-2-7b", "llama-2-13b", "qwen2.5-7b"], tokenizer: str, layers: int) -> None:
    """Random weights of the shape in bfloat16, in Hugging Face layout, with a tokenizer."""
    ids = load_tokenizer(tokenizer)
    config = replace(config_of(shape), vocab_size=len(ids))
    save_llama(random_model(replace(config, num_layers=layers) if layers else config, 0, "bfloat16"), folder)
    ids.save_pretrained(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write-model"]:
        path, shape, tokenizer, layers = sys.argv[2:]
        write_model(Path(path), shape, tokenizer, int(layers))  # pyright: ignore[reportArgumentType]
    else:
        run_script(Settings, main, __doc__)
