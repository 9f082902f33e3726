"""Prompt tokens per second on the CPU: our forward pass and llama.cpp on the same prompts, on the same two cores, in turn.

    python -m venv VENV && VENV/bin/pip install xllamacpp
    python experiments/bench_cpu_against_llama_cpp.py --python VENV/bin/python --output runs/cpu_against_llama_cpp.json

Both compute the logits after each of the same key-value prompts. lpes_jax reads them as one batch, with the products of each of
`--dtypes` (int8: `--score-dtype`). llama.cpp (`xllamacpp`, a process of its own) reads one after the other, with nothing
cached: the model's own file, and copies by the `gguf` package with Q8_0 and F16 matrices, because llama.cpp is faster with some
formats than with others. Both processes are bound to the same cores; while one works, the other waits. The figure is that of
the best round. The record has all rounds, and the load of the machine before and after, because a busy machine distorts
figures.

`same_next`: prompts after which a dtype has the same most likely token as the first of `--dtypes`. `products`: a single product
of the prompts' tokens with a matrix of the MLP, in GFLOP/s.
"""

import os

THREADS = 2
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])  # before JAX starts its threads; children inherit it

import json  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from datetime import UTC, datetime  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, Literal  # noqa: E402

import gguf  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from grid import markdown_table, run_script  # noqa: E402

from lpes_jax.errors import UserError  # noqa: E402
from lpes_jax.models.llama import Llama, load  # noqa: E402
from lpes_jax.models.llama.eight_bits import EightBitWeights  # noqa: E402
from lpes_jax.models.llama.model import hidden_states, output_logits, project, with_eight_bits  # noqa: E402
from lpes_jax.models.zoo import resolve  # noqa: E402
from lpes_jax.store.files import write_json  # noqa: E402
from lpes_jax.store.provenance import environment  # noqa: E402
from lpes_jax.tasks.key_value import KeyValue  # noqa: E402

WORKER = Path(__file__).parent / "llama_cpp_worker.py"
FORMATS = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "f16": gguf.GGMLQuantizationType.F16}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to time."""

    python: Path
    """The Python of an environment with xllamacpp."""
    model: str = "smollm2-135m-instruct"
    """A name in models/zoo or a .gguf file."""
    prompts: int = 8
    tokens: int = 420
    """Tokens of each prompt."""
    rounds: int = 5
    dtypes: tuple[Literal["float32", "bfloat16", "int8"], ...] = ("float32", "bfloat16", "int8")
    """Products of lpes_jax."""
    formats: tuple[Literal["file", "q8_0", "f16"], ...] = ("file", "q8_0", "f16")
    """Formats of llama.cpp's matrices; file: those of the model's file."""
    output: Path = Path("runs/cpu_against_llama_cpp.json")
    """The record."""


def main(s: Settings) -> None:
    """Measure, print and write the record."""
    source, before = resolve(s.model), os.getloadavg()
    if source.suffix != ".gguf":
        raise UserError(f"--model {s.model}: llama.cpp reads .gguf files; give one, or a name of the zoo whose weights are one")
    loaded = load(str(source), "float32")
    task = KeyValue(4)
    texts = [task.prompt(example, 2).text + example.value for example in task.examples("test", s.prompts, 0)]
    rows = [loaded.tokenizer(text)["input_ids"] for text in texts]
    tokens = np.array([np.resize(row, s.tokens) for row in rows], np.int32)
    models = {
        dtype: load(str(source), dtype).model if dtype != "int8" else with_eight_bits(loaded.model, "int8")
        for dtype in s.dtypes
    }
    with tempfile.TemporaryDirectory() as folder, several_workers(s, source, Path(folder)) as workers:
        runs: dict[str, Callable[[], float]] = {f"lpes_jax, {dtype}": reader(models[dtype], tokens) for dtype in s.dtypes}
        ids = tokens.tolist()
        for name, ask in workers.items():
            runs[f"llama.cpp, {name}"] = lambda ask=ask: sum(ask({"prefill": row})["seconds"] for row in ids)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(s.rounds + 1):
            for name, run in runs.items():
                taken = run()
                if number:  # the first round compiles, and reads the files
                    seconds[name].append(taken)
    count = s.prompts * s.tokens
    best = {name: count / min(durations) for name, durations in seconds.items()}
    record = {
        "model": source.name,
        "prompts": s.prompts,
        "tokens": s.tokens,
        "threads": THREADS,
        "tokens_per_second": best,
        "seconds": seconds,
        "same_next": same_next(models, tokens),
        "products": products(models, tokens, s.rounds),
        "load_before": before,
        "load_after": os.getloadavg(),
        "xllamacpp": workers.version,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        **environment(),
    }
    s.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(s.output, record)
    ours = best[f"lpes_jax, {s.dtypes[0]}"]
    table = [[name, f"{rate:.0f}", f"{rate / ours:.2f}"] for name, rate in best.items()]
    print(markdown_table([f"{s.prompts} x {s.tokens} tokens, {THREADS} threads", "tokens/s", f"x {s.dtypes[0]}"], table))
    print(f"same next token: {record['same_next']}\nGFLOP/s of a product: {record['products']}")
    print(f"load before {before[0]:.1f}, after {record['load_after'][0]:.1f}; record: {s.output}")


@partial(jax.jit, static_argnames="length")
def last_logits(model: Llama, tokens: jax.Array, length: int) -> jax.Array:
    """The logits after each prompt."""
    return output_logits(model, hidden_states(model, tokens, model.config.rope_table(length))[:, -1])


def reader(model: Llama, tokens: np.ndarray) -> Callable[[], float]:
    """Runs the model over the prompts, and returns the seconds."""

    def run() -> float:
        start = time.perf_counter()
        last_logits(model, jnp.asarray(tokens), tokens.shape[1]).block_until_ready()
        return time.perf_counter() - start

    return run


def same_next(models: dict[str, Llama], tokens: np.ndarray) -> dict[str, int]:
    """How many prompts have the same most likely next token as in the first dtype."""
    next_ids = {
        dtype: np.asarray(last_logits(model, jnp.asarray(tokens), tokens.shape[1])).argmax(axis=-1)
        for dtype, model in models.items()
    }
    first = next(iter(next_ids.values()))
    return {dtype: int((ids == first).sum()) for dtype, ids in next_ids.items()}


def products(models: dict[str, Llama], tokens: np.ndarray, rounds: int) -> dict[str, float]:
    """GFLOP/s of the first layer's product with `gate`: the best round, in turn."""
    runs = {}
    for dtype, model in models.items():
        weights = jax.tree.map(lambda leaf: leaf[0], model.layers.gate)
        wide = weights.scales[...].dtype if isinstance(weights, EightBitWeights) else weights[...].dtype
        x = jax.random.normal(jax.random.key(0), (tokens.size, model.config.hidden_size), wide)
        runs[dtype] = partial(jax.jit(project), x, weights)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    config = next(iter(models.values())).config
    flop = 2 * tokens.size * config.hidden_size * config.intermediate_size
    return {name: flop / min(durations[1:]) / 1e9 for name, durations in seconds.items()}


class Workers(dict[str, Callable[[dict[str, Any]], dict[str, Any]]]):
    """Asks llama.cpp, by the format of its matrices; and the version of xllamacpp."""

    version = ""


@contextmanager
def several_workers(s: Settings, source: Path, folder: Path) -> Iterator[Workers]:
    """A process of llama.cpp for each format."""
    workers, processes = Workers(), []
    try:
        for name in s.formats:
            file = source if name == "file" else rewritten(source, folder / f"{name}.gguf", FORMATS[name])
            command = [str(s.python), str(WORKER), str(file), str(s.tokens + 8), str(THREADS)]
            worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            processes.append(worker)
            first = worker.stdout.readline() if worker.stdout else ""
            if not first:
                raise UserError(f"--python {s.python}: llama.cpp did not start; does this environment have xllamacpp?")
            workers.version = json.loads(first)["xllamacpp"]
            workers[name] = partial(asked, worker)
        yield workers
    finally:
        for worker in processes:
            worker.stdin.close()
            worker.wait(timeout=60)


def asked(worker: "subprocess.Popen[str]", request: dict[str, Any]) -> dict[str, Any]:
    """The worker's answer."""
    assert worker.stdin and worker.stdout
    print(json.dumps(request), file=worker.stdin, flush=True)
    if not (line := worker.stdout.readline()):
        raise UserError("llama.cpp ended; run llama_cpp_worker.py by hand to see its messages")
    return json.loads(line)


def rewritten(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """A copy of a .gguf file whose matrices have another format."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            arrays = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if arrays else None)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 2:
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
