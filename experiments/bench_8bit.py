"""Scoring with 8-bit products (`--score-dtype`) against 16-bit ones: speed on a large shape, and agreement of the fitness.

    python experiments/bench_8bit.py --data nq-open-oracle.jsonl.gz           # everything, on a GPU with fp8 products
    python experiments/bench_8bit.py --parts correlation --dtypes float32 bfloat16 int8 --model smollm2-135m-instruct
    python experiments/bench_8bit.py --tiny                                   # a minute on a CPU: tests the script

Parts:

- `shape`: a forward pass of `--shape` with random weights: `--batch-size` prompts of `--tokens` random tokens, and the logits
  of the last position. The dtypes take turns in every round. TFLOP/s count the layers' products and causal attention. `calls`
  are the calls of cuBLAS in the compiled program by target; fp8 products are `__cublas$lt$matmul$f8`.
- `products`: single products of this shape's sizes: as in the model; with weights as [in, out]; with a float32 result (fp8); by
  XLA's default choice of kernels, which includes Triton's; rounding of activations and scales included, and left out.
- `correlation`: fitness of `--individuals` fixed individuals on `--model`: half of them uniform in the box of the preset
  `default`, half made by its genetic algorithm's mutations from factors of 1 (neighbours, which are harder to tell apart). One
  dtype's fitness against another's: Spearman's rank correlation, by accuracy (with the tie-break) and by log-likelihood. Then
  the individual that each dtype would choose, scored in `--reference` on held-out questions: its difference to the reference's
  own choice, with the standard error over questions (paired). The reference scored again, in smaller batches, shows how far two
  runs of the same dtype differ.
- `generation`: `bench_search.py`, one generation of the paper's search, in each of `--generation-dtypes` in turn; needs --data.

Every part writes PART.json into --output-path; then tables.md and summary.json have all parts found there.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the generation's processes need memory of the same card

import re  # noqa: E402
import shlex  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, Literal  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from grid import markdown_document, markdown_table, run_script  # noqa: E402
from jaxtyping import Float  # noqa: E402
from scipy.stats import spearmanr  # noqa: E402
from table05_latency import config_of, random_model  # noqa: E402

from lpes_jax.compilation import LARGE_PRODUCTS  # noqa: E402
from lpes_jax.curves import bezier  # noqa: E402
from lpes_jax.errors import UserError  # noqa: E402
from lpes_jax.json_files import read_json  # noqa: E402
from lpes_jax.models.llama import Llama, LlamaConfig, load  # noqa: E402
from lpes_jax.models.llama.eight_bits import (  # noqa: E402
    PROJECTIONS,
    EightBits,
    EightBitWeights,
    check_eight_bits,
    rounded,
    stacked,
)
from lpes_jax.models.llama.model import hidden_states, matmul, output_logits, with_eight_bits  # noqa: E402
from lpes_jax.scores import Scores  # noqa: E402
from lpes_jax.scoring import Scorer  # noqa: E402
from lpes_jax.search.genetic import PaperGA  # noqa: E402
from lpes_jax.search.lattice import Lattice  # noqa: E402
from lpes_jax.search.objective import Objective  # noqa: E402
from lpes_jax.settings.search import preset  # noqa: E402
from lpes_jax.store.files import write_json, write_text  # noqa: E402
from lpes_jax.store.provenance import environment  # noqa: E402
from lpes_jax.tasks.key_value import KeyValue  # noqa: E402
from lpes_jax.tasks.prompts import EncodedPrompt, encode, slot  # noqa: E402

Part = Literal["shape", "products", "correlation", "generation"]
ScoredIn = Literal["float32", "bfloat16", "int8", "fp8", "int8_but_down", "fp8_but_down"]
PARTS: tuple[Part, ...] = ("shape", "products", "correlation", "generation")
TARGET = re.compile(r'custom_call_target="([^"]*(?:cublas|gemm|matmul)[^"]*)"')


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure."""

    output_path: Path = Path("runs/bench_8bit")
    """Folder of PART.json, tables.md and summary.json."""
    parts: tuple[Part, ...] = PARTS
    dtypes: tuple[ScoredIn, ...] = ("bfloat16", "int8", "fp8")
    """The dtypes; int8 and fp8: 8-bit products in a model of --reference, in `but_down` all but the MLP's second."""
    reference: Literal["float32", "bfloat16"] = "bfloat16"
    """The dtype that the others are compared with, and in which 8-bit models keep everything else."""
    shape: Literal["llama-2-7b", "llama-2-13b", "qwen2.5-7b"] = "llama-2-7b"
    batch_size: int = 8
    tokens: int = 2048
    layers: int | None = None
    """A smaller number of layers, for trials."""
    rounds: int = 10
    model: str = "qwen2.5-coder-0.5b-instruct"
    """The model of the correlation: a name in models/zoo, a folder, a .gguf file, or a Hugging Face hub id."""
    individuals: int = 200
    num_pairs: int = 20
    """Key-value pairs of a prompt."""
    key_length: int | None = None
    """Hexadecimal characters of keys and values (default: UUIDs)."""
    limit: int = 50
    """Questions, each at three positions."""
    test_limit: int = 500
    """Held-out questions, each at three positions; 0: choices are not measured."""
    again: bool = True
    """Score the reference a second time."""
    seed: int = 0
    data: Path | None = None
    """nq-open-oracle.jsonl.gz, for the generation."""
    model_folder: Path = Path("runs/bench_search")
    """Folder of the generation's model, 13.5 GB; an existing one is reused."""
    generation_dtypes: tuple[ScoredIn, ...] = ("bfloat16", "fp8", "int8")
    tiny: bool = False
    """Tiny sizes; whether the script runs."""


def main(s: Settings) -> None:
    """Run the parts and write the tables."""
    if s.tiny:
        s = replace(
            s, batch_size=2, tokens=32, layers=1, rounds=2, model="tiny-retriever", individuals=8, num_pairs=3, key_length=2,
            limit=2, test_limit=4,
        )  # fmt: skip
    for part in s.parts:
        if part == "generation" and (s.data is None or s.tiny):
            print("generation: left out; it needs --data nq-open-oracle.jsonl.gz", flush=True)
            continue
        figures = {"shape": shape, "products": products, "correlation": correlation, "generation": generation}[part](s)
        asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(s).items()}
        s.output_path.mkdir(parents=True, exist_ok=True)
        write_json(
            s.output_path / f"{part}.json", {"settings": asked, **figures, **environment(), "date": time.strftime("%Y-%m-%d")}
        )
    records = {part: read_json(file) for part in PARTS if (file := s.output_path / f"{part}.json").exists()}
    text = markdown_document("8-bit products", [TABLES[part](record) for part, record in records.items()])
    write_text(s.output_path / "tables.md", text)
    write_json(s.output_path / "summary.json", records)
    print(text)


def in_dtype(model: Llama, dtype: ScoredIn) -> Llama:
    """A model with the products of its layers in this dtype; 16- and 32-bit ones are the model's own."""
    if dtype in ("float32", "bfloat16"):
        return model
    rounded = [name for name in PROJECTIONS if name != "down" or not dtype.endswith("but_down")]
    return with_eight_bits(model, kind_of(dtype), rounded)


def kind_of(dtype: ScoredIn) -> EightBits:
    """The kind of the 8-bit products."""
    return "fp8" if dtype.startswith("fp8") else "int8"


def available(s: Settings) -> list[ScoredIn]:
    """The dtypes of `s` that this device has; the others are named in a note."""
    found: list[ScoredIn] = []
    for dtype in s.dtypes:
        try:
            check_eight_bits(kind_of(dtype), "--dtypes")
            found.append(dtype)
        except UserError as error:
            print(f"note: {error}", flush=True)
    return found


def turns(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median seconds of each run. They take turns in every round, after one warm-up of each."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if number:
                seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(durations)) for name, durations in seconds.items()}


def shape(s: Settings) -> dict[str, Any]:
    """The forward pass of a large shape in each dtype."""
    config = small(s, config_of(s.shape))
    tokens = jnp.asarray(np.random.default_rng(s.seed).integers(0, config.vocab_size, (s.batch_size, s.tokens), np.int32))
    wide = random_model(config, s.seed, "bfloat16")

    @partial(jax.jit, compiler_options=LARGE_PRODUCTS)
    def last_logits(model: Llama, tokens: jax.Array) -> jax.Array:
        return output_logits(model, hidden_states(model, tokens, config.rope_table(s.tokens))[:, -1])

    models = {dtype: in_dtype(wide, dtype) for dtype in available(s) if dtype != "float32"}
    runs = {dtype: partial(last_logits, model, tokens) for dtype, model in models.items()}
    seconds = turns(runs, s.rounds)
    flop = work(config, s)
    figures = {}
    for dtype, model in models.items():
        text = last_logits.lower(model, tokens).compile().as_text() or ""
        figures[dtype] = {
            "milliseconds": 1e3 * seconds[dtype],
            "tflop_per_second": flop / seconds[dtype] / 1e12,
            "against_bfloat16": seconds["bfloat16"] / seconds[dtype] if "bfloat16" in seconds else None,
            "calls": dict(Counter(TARGET.findall(text))),
        }
    return {"dtypes": figures}


def small(s: Settings, config: LlamaConfig) -> LlamaConfig:
    """The config with fewer layers, and in `--tiny` narrower."""
    if s.tiny:
        config = replace(
            config, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=4, head_dim=16, vocab_size=256
        )
    return replace(config, num_layers=s.layers or config.num_layers)


def work(config: LlamaConfig, s: Settings) -> float:
    """Multiplications and additions of a pass, without those of the output layer."""
    heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = config.hidden_size * (2 * heads + 2 * keys + 3 * config.intermediate_size)
    attention = 2 * heads * (s.tokens + 1) / 2
    return 2.0 * config.num_layers * s.batch_size * s.tokens * (weights + attention)


def products(s: Settings) -> dict[str, Any]:
    """Single products of the shape's sizes, as in the model and otherwise."""
    config, rows = small(s, config_of(s.shape)), s.batch_size * s.tokens
    found = []
    for inputs, outputs in ((config.hidden_size, config.intermediate_size), (config.intermediate_size, config.hidden_size)):
        keys = jax.random.split(jax.random.key(s.seed))
        x = jax.random.normal(keys[0], (rows, inputs), jnp.bfloat16)
        weights = jax.random.normal(keys[1], (inputs, outputs), jnp.bfloat16)
        seconds = turns(
            product_runs(x, weights, [dtype for dtype in available(s) if dtype in ("bfloat16", "int8", "fp8")]), s.rounds
        )
        flop = 2.0 * rows * inputs * outputs
        rates = {name: flop / value / 1e12 for name, value in seconds.items()}
        found.append({"rows": rows, "inputs": inputs, "outputs": outputs, "tflop_per_second": rates})
    return {"products": found}


def product_runs(x: jax.Array, weights: jax.Array, dtypes: Sequence[ScoredIn]) -> dict[str, Callable[[], Any]]:
    """The ways to compute x @ weights."""
    ours, default = partial(jax.jit, compiler_options=LARGE_PRODUCTS), jax.jit
    runs: dict[str, Callable[[], Any]] = {}
    for dtype in dtypes:
        if dtype == "bfloat16":
            runs["bfloat16"] = partial(ours(matmul), x, weights)
            runs["bfloat16, default kernels"] = partial(default(matmul), x, weights)
            continue
        values, scales = (leaf[0] for leaf in stacked(weights[None], kind_of(dtype)))
        layer, narrow = EightBitWeights(values, scales), rounded(x, values.dtype)[0]
        kind = jnp.dtype(jnp.int32 if dtype == "int8" else jnp.bfloat16)
        runs[dtype] = partial(ours(lambda layer, x: layer.product(x)), layer, x)
        runs[f"{dtype}, default kernels"] = partial(default(lambda layer, x: layer.product(x)), layer, x)
        for name, axis, stored, result in (
            (f"{dtype}, product only", 1, values, kind),
            (f"{dtype}, product only, weights [in, out]", 0, values.T, kind),
            (f"{dtype}, product only, float32 result", 1, values, jnp.dtype(jnp.float32)),
        ):
            if result != jnp.float32 or dtype == "fp8":
                axes = ((1,), (axis,)), ((), ())
                bare = partial(jax.lax.dot_general, dimension_numbers=axes, preferred_element_type=result)
                runs[name] = partial(ours(bare), narrow, stored)
    return runs


def correlation(s: Settings) -> dict[str, Any]:
    """Fitness of the same individuals in each dtype, and the individuals that each would choose."""
    settings = preset("default")
    positions, count = settings.objective.search_positions, s.individuals
    loaded = {dtype: load(s.model, dtype) for dtype in {s.reference, *s.dtypes} & {"float32", "bfloat16"}}
    config = loaded[s.reference].model.config
    factors = individuals_of(s, config.num_layers)
    task = KeyValue(s.num_pairs) if s.key_length is None else KeyValue(s.num_pairs, key_length=s.key_length)

    def encoded(split: Literal["search", "test"], limit: int) -> list[EncodedPrompt]:
        prompts = [
            task.prompt(example, slot(position, task.num_items), position)
            for example in task.examples(split, limit, s.seed)
            for position in positions
        ]
        return encode(prompts, loaded[s.reference].tokenizer, config.max_position_embeddings)

    searched, held_out = encoded("search", s.limit), encoded("test", s.test_limit) if s.test_limit else []
    own = loaded[s.reference].model
    models = {dtype: loaded[dtype].model if dtype in loaded else in_dtype(own, dtype) for dtype in s.dtypes}
    models.setdefault(s.reference, own)
    scores: dict[str, Scores] = {}
    seconds: dict[str, float] = {}
    again = f"{s.reference}, again"
    for name in (*models, again) if s.again else models:
        how: dict[str, Any] = {"batch_size": 3, "share_prefixes": False} if name == again else {"individuals": count}
        scorer = Scorer(own if name == again else models[name], searched, **how)
        start = time.perf_counter()
        scores[name] = scorer(factors)
        seconds[name] = time.perf_counter() - start
        print(f"{name}: {count} individuals x {len(searched)} prompts in {seconds[name]:.0f} s", flush=True)
    tokens = np.array([min(map(len, prompt.answers)) for prompt in searched])
    objectives = {
        "accuracy": Objective(settings.objective, positions, tokens),
        "log_likelihood": Objective(replace(settings.objective, fitness="log_likelihood"), positions, tokens),
    }
    figures: dict[str, Any] = {"seconds": seconds, "fitness": {}}
    for kind, objective in objectives.items():
        fitness = {name: objective.by_question(*each).mean(axis=1) for name, each in scores.items()}
        figures["fitness"][kind] = {
            name: compared(fitness[name], fitness[s.reference], count // 2) | {"chosen": int(fitness[name].argmax())}
            for name in fitness
        }
        if held_out:
            ids = sorted({each["chosen"] for each in figures["fitness"][kind].values()})
            values = dict(zip(ids, judged(objective, Scorer(own, held_out), factors[ids]), strict=True))
            theirs = values[figures["fitness"][kind][s.reference]["chosen"]]
            for each in figures["fitness"][kind].values():
                each |= difference(values[each["chosen"]], theirs)
    return figures


def individuals_of(s: Settings, layers: int) -> Float[np.ndarray, "P L"]:
    """The fixed individuals: the first half uniform in the box, the rest mutants of the start."""
    settings, half = preset("default"), s.individuals // 2
    settings = settings.replace(population_size=s.individuals - half, parents=min(12, s.individuals - half))
    ga = PaperGA(Lattice(layers, space=settings.space), settings.ga)
    genes, _ = ga.initial_population(jax.random.key(s.seed), ga.default_params)
    near = np.array(ga.control_points(np.asarray(genes)), np.float32)
    rng = np.random.default_rng(s.seed)
    anywhere = np.repeat(near[:1], half, axis=0)
    anywhere[:, :, 1] = rng.uniform(settings.space.min_factor, settings.space.max_factor, anywhere.shape[:2])
    points = jnp.asarray(np.concatenate([anywhere, near]))
    return np.asarray(jax.jit(jax.vmap(lambda each: bezier(each, layers)))(points))


def compared(ours: Float[np.ndarray, "P"], theirs: Float[np.ndarray, "P"], half: int) -> dict[str, float]:
    """Spearman's correlations of two dtypes' fitness: of all individuals, and of both halves."""
    parts = {"all": slice(None), "anywhere": slice(half), "near": slice(half, None)}
    found = {f"spearman_{name}": float(np.asarray(spearmanr(ours[part], theirs[part]))[0]) for name, part in parts.items()}
    return found | {"largest_difference": float(np.abs(ours - theirs).max()), "spread": float(theirs.std(ddof=1))}


def judged(objective: Objective, judge: Scorer, factors: Float[np.ndarray, "n L"]) -> Float[np.ndarray, "n Q"]:
    """The values of held-out questions, whose mean is the fitness (of accuracy: without the tie-break)."""
    scores = judge(factors)
    settings = replace(objective.settings, tie_break=False)
    return Objective(settings, objective.positions, judge.answer_tokens).by_question(*scores)


def difference(ours: Float[np.ndarray, "Q"], theirs: Float[np.ndarray, "Q"]) -> dict[str, float]:
    """Held-out value of a choice and its difference to the reference's choice, with standard errors over questions."""
    paired = ours - theirs
    return {
        "held_out": float(ours.mean()),
        "standard_error": float(ours.std(ddof=1) / np.sqrt(len(ours))),
        "difference": float(paired.mean()),
        "standard_error_of_difference": float(paired.std(ddof=1) / np.sqrt(len(paired))),
    }


def generation(s: Settings) -> dict[str, Any]:
    """One generation of the paper's search in each dtype, each in processes of its own."""
    found = {}
    for dtype in s.generation_dtypes:
        name = f"generation_{dtype}"
        flags = f"--score-dtype {dtype} --overwrite" if dtype in ("int8", "fp8") else f"--dtype {dtype} --overwrite"
        script = Path(__file__).with_name("bench_search.py")
        command = [sys.executable, str(script), "--data", str(s.data), "--shape", s.shape, "--folder", str(s.model_folder)]
        command += ["--name", name, f"--search-flags={flags}", *(["--layers", str(s.layers)] if s.layers else [])]
        print(shlex.join(command), flush=True)
        subprocess.run(command, check=True)
        record = read_json(s.model_folder / f"{name}.json")
        keys = "command_seconds", "search_seconds", "gpus", "gpu_seconds", "prompts"
        found[dtype] = {key: record[key] for key in keys}
    return {"dtypes": found}


def shape_table(record: Mapping[str, Any]) -> str:
    """The table of `shape`."""
    s = record["settings"]
    rows = [
        [
            dtype,
            f"{figures['milliseconds']:.1f}",
            f"{figures['tflop_per_second']:.1f}",
            f"{figures['against_bfloat16']:.2f}" if figures["against_bfloat16"] else "-",
            ", ".join(f"{count} {target}" for target, count in figures["calls"].items()) or "-",
        ]
        for dtype, figures in record["dtypes"].items()
    ]
    head = f"{s['shape']}, {s['batch_size']} x {s['tokens']:,} tokens, {record['devices']['kind']}"
    return f"{head}\n\n" + markdown_table(["products", "ms", "TFLOP/s", "x bfloat16", "calls in the program"], rows)


def products_table(record: Mapping[str, Any]) -> str:
    """The table of `products`, in TFLOP/s."""
    columns = record["products"]
    sizes = [f"{each['rows']:,} x {each['inputs']:,} x {each['outputs']:,}" for each in columns]
    names = columns[0]["tflop_per_second"]
    rows = [[name, *(f"{each['tflop_per_second'][name]:.1f}" for each in columns)] for name in names]
    return "Single products, TFLOP/s\n\n" + markdown_table(["product", *sizes], rows)


def correlation_table(record: Mapping[str, Any]) -> str:
    """The tables of `correlation`, one for each kind of fitness."""
    s, text = record["settings"], ""
    head = f"{Path(s['model']).name}, {s['individuals']} individuals, {s['num_pairs']} pairs, {s['limit']} questions x 3"
    for kind, names in record["fitness"].items():
        unit = 100 if kind == "accuracy" else 1
        rows = [
            [
                name,
                *(f"{each[f'spearman_{part}']:.4f}" for part in ("all", "anywhere", "near")),
                str(each["chosen"]),
                *(
                    (
                        f"{unit * each['held_out']:.2f} ± {unit * each['standard_error']:.2f}",
                        f"{unit * each['difference']:+.2f} ± {unit * each['standard_error_of_difference']:.2f}",
                    )
                    if "held_out" in each
                    else ("-", "-")
                ),
                f"{record['seconds'][name]:.0f}",
            ]
            for name, each in names.items()
        ]
        columns = ["scored in", "all", "in the box", "near 1", "choice", "held-out", "against the reference's", "seconds"]
        text += f"{head}: Spearman's correlation with {s['reference']} by {kind.replace('_', '-')}\n\n"
        text += markdown_table(columns, rows) + "\n"
    return text


def generation_table(record: Mapping[str, Any]) -> str:
    """The table of `generation`."""
    rows = [
        [dtype, f"{each['gpu_seconds']:.0f}", f"{each['search_seconds']:.0f}", f"{each['prompts']:,}"]
        for dtype, each in record["dtypes"].items()
    ]
    head = f"One generation of the paper's search, {record['settings']['shape']}"
    return f"{head}\n\n" + markdown_table(["products", "GPU-seconds", "search, s", "prompts"], rows)


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "shape": shape_table,
    "products": products_table,
    "correlation": correlation_table,
    "generation": generation_table,
}


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
