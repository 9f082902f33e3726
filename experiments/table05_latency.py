"""Costs of each method: time and memory of a prompt, and with new tokens after it (Table 5).

    python experiments/table05_latency.py --shape llama-2-7b --tokens 2048
    python experiments/table05_latency.py --model smollm2-135m-instruct --tokens 2048

A shape has random weights, made on the device in their own dtype. Times depend on sizes and not on values, so no setting is
tuned: Attention Buckets has its seven bases, MoICE an untrained router of as many, Self-Extend groups of 4 beyond 512 tokens,
ZeroTuning and SEAL one number for all heads, LPES a factor per layer that rises from 1 to 2, and its learnt forms a number
per frequency. All methods take turns in one process on the same random tokens, with the same attention kernel. A figure is
the median of the rounds, without the first. Memory is what a program needs in addition to weights and prompts. Methods of the
same structure and sizes share one compiled program, called with other tables; the column `program` numbers the programs. A
method with the baseline's number therefore costs exactly as much as the baseline.

Each number of tokens writes one JSON file; existing ones are not measured again. Then tables.md and summary.json are written.

Letters: B batch, T tokens.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from grid import GridFlags, markdown_table, run_script, write_tables
from transfer import load_cell

from lpes_jax.compare import NAMES
from lpes_jax.errors import UserError
from lpes_jax.evaluation import BASELINE
from lpes_jax.factors import LayerFactors
from lpes_jax.methods import Maker
from lpes_jax.methods.attention_buckets import attention_buckets
from lpes_jax.methods.hidden_channel import hidden_channel
from lpes_jax.methods.moice import Router, moice
from lpes_jax.methods.ms_poe import ms_poe
from lpes_jax.methods.seal import seal
from lpes_jax.methods.self_extend import self_extend
from lpes_jax.methods.tables import dynamic_ntk, lpes, mean_of, ntk_by_base, uniform, yarn
from lpes_jax.methods.zero_tuning import zero_tuning
from lpes_jax.models import zoo
from lpes_jax.models.llama import Llama, LlamaConfig, Loaded, load
from lpes_jax.models.llama.generate import greedy
from lpes_jax.models.llama.method import Method, table_method
from lpes_jax.prefixes import pack_rows
from lpes_jax.rope import RopeParameters
from lpes_jax.scores import batch_scores
from lpes_jax.store.files import write_json
from lpes_jax.store.provenance import environment

SHAPES = {"llama-2-7b": "llama-2-7b-chat", "llama-2-13b": "vicuna-13b-v1.5", "qwen2.5-7b": "qwen2.5-7b"}  # and their zoo cards
PAPER = {"baseline": 0.71, "attention_buckets": 3.38, "ms_poe": 1.03, "moice": 1.72, "lpes": 0.71}  # seconds per sample


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes and numbers of rounds."""

    output_path: Path = Path("runs/table05")
    """Folder of the cells, tables.md and summary.json."""
    shape: Literal["llama-2-7b", "llama-2-13b", "qwen2.5-7b"] = "llama-2-7b"
    """Sizes of a model, with random weights."""
    model: str | None = None
    """A model to load instead: a name in models/zoo, a folder, a .gguf file, or a Hugging Face hub id."""
    tokens: tuple[int, ...] = (2048,)
    """Tokens of a prompt; each number is a table."""
    prompts: int = 1
    """B: prompts per pass."""
    methods: tuple[str, ...] = NAMES
    """As in compare."""
    new_tokens: int = 32
    """Tokens to generate after the prompt; 0: none."""
    repeats: int = 20
    """Rounds of prompts."""
    generation_repeats: int = 5
    """Rounds of generation."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    seed: int = 0
    """Seed of the weights and the tokens."""


def config_of(shape: str) -> LlamaConfig:
    """The sizes from the zoo's card."""
    card = json.loads((Path(zoo.__file__).parent / SHAPES[shape] / "model.json").read_text(encoding="utf-8"))["config"]
    rope = RopeParameters.from_hf({"rope_parameters": card.pop("rope")}, shape)
    return LlamaConfig(**card, rms_norm_eps=1e-5, rope=rope)


def random_model(config: LlamaConfig, seed: int, dtype: str) -> Llama:
    """Norms of 1 and other weights normal with 0.02, made on the device in `dtype`, for one layer of one weight at a time."""
    shapes = jax.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype)))
    leaves, structure = jax.tree.flatten_with_path(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    weights = [
        jnp.ones(leaf.shape, leaf.dtype) if "norm" in jax.tree_util.keystr(path) else _normal(key, leaf.shape, leaf.dtype)
        for (path, leaf), key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, weights)


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    def row(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, shape[1:], dtype) * jnp.asarray(0.02, dtype)

    # As many rows at once as there are layers or so: one of a stack of layers, blocks of an embedding.
    return jax.lax.map(row, jax.random.split(key, shape[0]), batch_size=max(1, shape[0] // 32))


def makers(config: LlamaConfig, seed: int) -> dict[str, Maker]:
    """Every method of `python -m lpes_jax.compare`."""
    rising = LayerFactors(np.linspace(1.0, 2.0, config.num_layers))
    numbers = np.linspace(1.0, 2.0, config.num_layers * (config.rotary_dim // 2)).reshape(config.num_layers, -1)
    ones = np.ones_like(numbers)
    return {
        BASELINE: lambda config, length: table_method(config.rope_table(length)),
        "uniform": uniform(1.5),
        "pi": mean_of(rising),
        "dynamic_ntk": dynamic_ntk(2.0),
        "ntk_by_base": ntk_by_base(2.0),
        "yarn": yarn(2.0),
        "attention_buckets": attention_buckets(),
        "ms_poe": ms_poe(),
        "moice": moice(Router.init(jax.random.key(seed), config)),
        "self_extend": self_extend(group=4, window=512),
        "hidden_channel": hidden_channel(0),
        "zero_tuning": zero_tuning(0.5),
        "seal": seal(np.full((config.num_layers, config.num_heads), 1.1, np.float32)),
        "learnt_factors": lpes(LayerFactors(numbers, "layer_band")),
        "learnt_gains": lpes(LayerFactors(ones, "layer_band", numbers, "layer_band")),
        "learnt_both": lpes(LayerFactors(numbers, "layer_band", numbers, "layer_band")),
        "lpes": lpes(rising),
    }


def methods_of(s: Settings, config: LlamaConfig, length: int) -> tuple[dict[str, Method], dict[str, str]]:
    """Each method for texts of `length` tokens, and the reasons for missing ones."""
    methods, refused = {}, {}
    for name, maker in makers(config, s.seed).items():
        if name == BASELINE or name in s.methods:
            try:
                methods[name] = maker(config, length)
            except UserError as error:
                refused[name] = str(error)
    return methods, refused


def compiled(run: Callable[..., Any], arguments: tuple[Any, ...], known: dict[Any, Any]) -> tuple[Any, list[Any]]:
    """The compiled program of `run` and its arguments; from `known` if it has the same structure and shapes."""
    leaves, structure = jax.tree.flatten(arguments)
    key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    if key not in known:
        known[key] = jax.jit(lambda *leaves: run(*jax.tree.unflatten(structure, leaves))).lower(*leaves).compile()
    return known[key], leaves


def costs(run: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]], repeats: int) -> dict[str, dict[str, Any]]:
    """Costs of `run` on each entry's arguments: seconds, ratio to the baseline, bytes, and the number of the program."""
    known: dict[Any, Any] = {}
    programs = {name: compiled(run, given, known) for name, given in arguments.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    order = np.random.default_rng(0)  # shuffled in each round, so that no method always follows the same one
    for _ in range(repeats + 1):
        for name in order.permutation(list(programs)):
            program, leaves = programs[name]
            begun = time.perf_counter()
            jax.block_until_ready(program(*leaves))
            seconds[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(durations[1:]) for name, durations in seconds.items()}
    numbers = list(known.values())
    found = {}
    for name, (program, _) in programs.items():
        memory = program.memory_analysis()
        found[name] = {
            "seconds": medians[name],
            "against_baseline": medians[name] / medians[BASELINE],
            "fastest_and_slowest": [min(seconds[name][1:]), max(seconds[name][1:])],
            "program_memory_bytes": None if memory is None else int(memory.temp_size_in_bytes),
            "program": numbers.index(program),
        }
    return found


def measure(s: Settings, loaded: Loaded, tokens: int) -> dict[str, Any]:
    """The costs of all methods at a length."""
    model, vocabulary = loaded.model, loaded.model.config.vocab_size
    ids = np.random.default_rng(s.seed).integers(0, vocabulary, (s.prompts, tokens)).tolist()
    batch = pack_rows([(row[:-1], row[-1:]) for row in ids])
    methods, refused = methods_of(s, model.config, batch.tokens.shape[1])
    record: dict[str, Any] = {"refused": refused, "passes": {name: method.passes for name, method in methods.items()}}
    record["prompt"] = costs(batch_scores, {name: (model, batch, method) for name, method in methods.items()}, s.repeats)
    if s.new_tokens:
        methods, _ = methods_of(s, model.config, tokens + s.new_tokens)
        prompts, lengths = jnp.array(ids, jnp.int32), jnp.full(s.prompts, tokens, jnp.int32)
        run, stop = partial(greedy, max_new_tokens=s.new_tokens), jnp.zeros(0, jnp.int32)
        given = {name: (model, prompts, lengths, method, stop) for name, method in methods.items()}
        record["generation"] = costs(run, given, s.generation_repeats)
    return record


def table(record: Mapping[str, Any], new_tokens: int) -> str:
    """One row per method, then the paper's: seconds of a question with its answer."""
    generated = "generation" in record
    rows = []
    for name, cost in record["prompt"].items():
        cells = [f"{1000 * cost['seconds']:.2f}", f"{cost['against_baseline']:.2f}", _mebibytes(cost), str(cost["program"])]
        if generated:
            cost = record["generation"][name]
            cells += [f"{1000 * cost['seconds']:.1f}", f"{cost['against_baseline']:.2f}", _mebibytes(cost)]
        rows.append([name, f"{record['passes'][name]:g}", *cells])
    for name, seconds in PAPER.items():
        cells = [f"{1000 * seconds:.0f}", f"{seconds / PAPER[BASELINE]:.2f}", "-"]
        rows.append([f"paper: {name}", "-", *(["-"] * 4 + cells if generated else [*cells, "-"])])
    header = ["method", "passes a token", "prompt (ms)", "against baseline", "memory (MiB)", "program"]
    if generated:
        header += [f"with {new_tokens} new tokens (ms)", "against baseline", "memory (MiB)"]
    return markdown_table(header, rows)


def _mebibytes(cost: Mapping[str, Any]) -> str:
    return "-" if cost["program_memory_bytes"] is None else f"{cost['program_memory_bytes'] / 2**20:.0f}"


def main(s: Settings) -> None:
    """Measure missing lengths and write the tables."""
    for name, least in (("prompts", 1), ("repeats", 1), ("generation_repeats", 1), ("new_tokens", 0)):
        if getattr(s, name) < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(s, name)}")
    if unknown := [name for name in s.methods if name not in NAMES]:
        raise UserError(f"--methods {unknown[0]!r} is not known; the methods are: {', '.join(NAMES)}")
    name = s.shape if s.model is None else Path(s.model).name
    used = json.loads(json.dumps({k: v for k, v in asdict(s).items() if k not in ("output_path", "tokens")}))
    loaded: Loaded | None = None
    records = {}
    for tokens in dict.fromkeys(s.tokens):
        path = s.output_path / f"{name}_{tokens}.json"
        if not path.exists():
            print(f"== {name}, {tokens} tokens", flush=True)
            if loaded is None:
                s.output_path.mkdir(parents=True, exist_ok=True)
                loaded = _loaded(s)
            write_json(path, {"settings": used, "model": loaded.identity, **environment(), **measure(s, loaded, tokens)})
        records[str(tokens)] = load_cell(path, used)
    about = (
        f"Ours: {'random weights' if s.model is None else 'the model itself'}, medians of {s.repeats} rounds (with new tokens "
        f"of {s.generation_repeats}). Rows of the paper (Table 5): Vicuna-7B on a question of MDQA with its answer, mean of "
        "500, one H100, FlashAttention-2 for all.\n"
    )
    parts = [about]
    for tokens, record in records.items():
        dtype, device = record["model"]["dtype"], record["devices"]["kind"]
        parts += [f"## {name}, {s.prompts} x {tokens} tokens, {dtype}, {device}\n", table(record, s.new_tokens)]
        parts += [f"{method}: left out. {reason}\n" for method, reason in record["refused"].items()]
    flags = GridFlags(output_path=s.output_path)
    write_tables(flags, "What methods cost (Table 5)", parts, {"settings": used, "ours": records, "paper": PAPER})


def _loaded(s: Settings) -> Loaded:
    if s.model is not None:
        return load(s.model, s.dtype)
    dtype = ("float32" if jax.default_backend() == "cpu" else "bfloat16") if s.dtype == "auto" else s.dtype
    config = config_of(s.shape)
    identity = {"name": f"{s.shape}, random weights", "num_layers": config.num_layers, "sha256": None, "dtype": dtype}
    tokenizer: Any = None  # no text is used
    return Loaded(random_model(config, s.seed, dtype), tokenizer, identity, [])


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
