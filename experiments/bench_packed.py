"""Packed weights on a large shape: seconds of a search's step and peak memory, within 24 and 16 GiB of a card.

    python experiments/bench_packed.py                    # on a GPU: a 7B shape with random weights
    python experiments/bench_packed.py --tiny             # a minute on a CPU: tests the script

Each cell is a process of its own, whose share of the card is set to `--gib` (XLA_PYTHON_CLIENT_MEM_FRACTION; the card's size is
nvidia-smi's). The weights are random codes of the layout, made on the device. Cells:

- `genetic`: one block of `--individuals` individuals on `--prompts` prompts of `--tokens` tokens without shared prefixes, by
  the scorer that a search uses, which plans its own passes.
- `gradient`: the loss and gradient of a step of `--preset best` in a factor and a gain of every frequency: `--minibatch`
  prompts, and the KL divergence on 4 windows of 512 tokens. If it runs out of memory, half of the prompts, until it fits.

The time to compile is the first call's, minus the median of the others. Planned figures are those of the doctor. Writes
results.json and tables.md into --output-path.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

Form = Literal["bf16", "q8", "q4"]
Step = Literal["genetic", "gradient"]


@dataclass(frozen=True, kw_only=True)
class BenchPackedFlags:
    """Sizes and cells."""

    output_path: Path = Path("runs/bench_packed")
    """Folder of results.json and tables.md."""
    shape: Literal["llama-2-7b", "llama-2-13b", "qwen2.5-7b"] = "llama-2-7b"
    """Sizes of a model, with random weights."""
    forms: tuple[Form, ...] = ("bf16", "q8", "q4")
    """How the layers' matrices are stored: 16 bits, as in a Q8_0 file, as in a Q4_K file."""
    gib: tuple[float, ...] = (24, 16)
    """GiB of the card that a process may use; 0: JAX's own share."""
    steps: tuple[Step, ...] = ("genetic", "gradient")
    """What to measure."""
    tokens: int = 2048
    """Tokens of a prompt with its answer."""
    prompts: int = 8
    """Prompts of the genetic step."""
    individuals: int = 4
    """Individuals of the genetic step."""
    minibatch: int = 16
    """Prompts of the gradient step."""
    window: int = 512
    """Tokens of a window of text."""
    repeats: int = 3
    """Timed calls, after the first."""
    tiny: bool = False
    """Sizes for a CPU."""
    cell: str = ""
    """Internal: FORM,STEP of this process."""


def main(flags: BenchPackedFlags) -> None:
    """Run the cells, one process each, and write the tables."""
    if flags.tiny:
        small = {"gib": (0.0,), "tokens": 64, "prompts": 2, "individuals": 2, "minibatch": 2, "window": 16, "repeats": 1}
        flags = replace(flags, **small)
    flags.output_path.mkdir(parents=True, exist_ok=True)
    records = []
    for gib in flags.gib:
        environment = dict(os.environ)
        if gib:
            environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{gib / card_gib():.4f}"
        for form in flags.forms:
            for step in flags.steps:
                command = [sys.executable, __file__, *arguments(replace(flags, cell=f"{form},{step}"))]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                record: dict[str, Any] = {"gib": gib, "form": form, "step": step}
                if done.returncode:
                    record["error"] = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
                else:
                    record |= json.loads(done.stdout.splitlines()[-1])
                records.append(record)
                print(json.dumps(record), flush=True)
                (flags.output_path / "results.json").write_text(
                    json.dumps({"cells": records}, indent=1) + "\n", encoding="utf-8"
                )
    text = table(records)
    (flags.output_path / "tables.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def arguments(flags: BenchPackedFlags) -> list[str]:
    """The flags as words of a command."""
    words: list[str] = []
    for name, value in asdict(flags).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words += [flag] if value else []
        else:
            words += [flag, *map(str, value if isinstance(value, tuple) else [value])]
    return words


def card_gib() -> float:
    """GiB of the first card, from nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024


def table(records: list[dict[str, Any]]) -> str:
    """All cells in Markdown."""
    columns = (
        "gib",
        "form",
        "step",
        "prompts",
        "seconds",
        "seconds_per_prompt",
        "peak_gib",
        "weights_gib",
        "planned_gib",
        "first_seconds",
    )
    lines = ["| " + " | ".join([*columns, "device"]) + " |", "| --- " * (len(columns) + 1) + "|"]
    for record in records:
        cells = [record.get(column, "") for column in columns]
        shown = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append("| " + " | ".join([*shown, record.get("device", record.get("error", ""))]) + " |")
    return "\n".join(lines)


def measure(flags: BenchPackedFlags) -> dict[str, Any]:
    """One cell, in this process."""
    import jax
    import numpy as np

    from lpes_jax.doctor.plan import GIB, plan
    from lpes_jax.errors import UserError
    from lpes_jax.memory import out_of_memory, planned_step

    form, step = flags.cell.split(",")
    model = random_packed(flags, form)
    backend = "cpu" if jax.default_backend() == "cpu" else "gpu"
    itemsize = model.embed[...].dtype.itemsize
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    prompts = flags.prompts if step == "genetic" else flags.minibatch
    while True:
        run = genetic(flags, model, prompts) if step == "genetic" else gradient(flags, model, prompts)
        try:
            seconds = []
            for _ in range(1 + flags.repeats):
                start = time.perf_counter()
                jax.block_until_ready(run())
                seconds.append(time.perf_counter() - start)
            break
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error) or prompts == 1:
                raise
            prompts //= 2
        except UserError as error:
            raise SystemExit(f"error: {error}") from error
    packed, config = form != "bf16", model.config
    if step == "genetic":
        count = prompts * flags.individuals
        planned = plan(config, weights, itemsize, 2**60, flags.tokens, packed=packed, backend=backend)[0].least
    else:
        count = prompts
        planned = weights + planned_step(
            config, itemsize, prompts, flags.tokens, 4, flags.window, packed=packed, backend=backend
        )
    stats = jax.local_devices()[0].memory_stats() or {}
    median = float(np.median(seconds[1:]))
    return {
        "prompts": count,
        "seconds": median,
        "seconds_per_prompt": median / count,
        "all_seconds": seconds[1:],
        "first_seconds": seconds[0] - median,
        "peak_gib": stats["peak_bytes_in_use"] / GIB if stats else None,
        "limit_gib": stats["bytes_limit"] / GIB if stats else None,
        "weights_gib": weights / GIB,
        "planned_gib": planned / GIB,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "flags": {name: str(value) for name, value in asdict(flags).items()},
    }


def random_packed(flags: BenchPackedFlags, form: str) -> Any:
    """The shape with random weights: matrices of the layers in the form, all else in 16 bits (on a CPU in float32)."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from gguf import GGMLQuantizationType
    from table05_latency import config_of, random_model

    from lpes_jax.models.llama import Llama
    from lpes_jax.models.llama.eight_bits import PROJECTIONS
    from lpes_jax.models.llama.packed import Packed
    from lpes_jax.models.llama.packing import LAYOUTS, part_shapes

    config = config_of(flags.shape)
    if flags.tiny:
        small = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 2, "num_heads": 4, "head_dim": 64}
        config = replace(config, **small, num_kv_heads=2, vocab_size=512)
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if form == "bf16":
        return random_model(config, 0, dtype)
    layout = LAYOUTS[GGMLQuantizationType.Q8_0 if form == "q8" else GGMLQuantizationType.Q4_K]
    key = jax.random.key(0)
    shapes = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype)))
    layers = shapes.layers
    for name in PROJECTIONS:
        count, inputs, outputs = getattr(layers, name).shape
        parts = {}
        for part, (shape, kind) in part_shapes(layout, (count, outputs, inputs)).items():
            key, own = jax.random.split(key)
            if kind == jnp.uint8 or part == "codes":
                bits = jax.jit(lambda own, shape=shape: jax.random.bits(own, shape, jnp.uint8))(own)
                parts[part] = bits if kind == jnp.uint8 else jax.lax.bitcast_convert_type(bits, kind)
            elif part == "minimum":
                parts[part] = jnp.full(shape, 7.5 * 2.0**-9, kind)
            else:  # the codes of 4 bits are around 7.5, those of 8 bits around 0
                parts[part] = jnp.full(shape, {"scale": 2.0**-9 if form == "q4" else 2.0**-12, "offset": 0}.get(part, 1), kind)
        setattr(layers, name, Packed(**parts))

    def made(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if "norm" in jax.tree_util.keystr(path):
            return jnp.ones(leaf.shape, leaf.dtype)
        return (0.02 * jax.random.normal(jax.random.key(1), leaf.shape, jnp.float32)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(made, shapes)


def random_prompts(flags: BenchPackedFlags, model: Any, count: int) -> list[Any]:
    """Prompts without a shared prefix."""
    import numpy as np

    from lpes_jax.tasks.prompts import EncodedPrompt

    rng = np.random.default_rng(0)
    draw = lambda size: rng.integers(3, model.config.vocab_size, size).tolist()  # noqa: E731
    return [EncodedPrompt(draw(flags.tokens - 32), [draw(32)]) for _ in range(count)]


def genetic(flags: BenchPackedFlags, model: Any, prompts: int) -> Any:
    """Scores of a block of individuals."""
    import numpy as np

    from lpes_jax.scoring import Scorer

    scorer = Scorer(model, random_prompts(flags, model, prompts), individuals=flags.individuals)
    factors = np.random.default_rng(1).uniform(1, 2, (flags.individuals, model.config.num_layers))
    return lambda: scorer(factors)


def gradient(flags: BenchPackedFlags, model: Any, prompts: int) -> Any:
    """The loss and gradient of a step."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from lpes_jax.search.gradient import answer_loss, text_loss
    from lpes_jax.search.minibatches import pack
    from lpes_jax.settings.search import preset

    config = model.config
    examples = pack(random_prompts(flags, model, prompts), [1.0] * prompts)
    windows = jnp.asarray(np.random.default_rng(2).integers(3, config.vocab_size, (4, flags.window)), jnp.int32)
    weight = preset("best").text.text_weight

    def loss(numbers: Any, model: Any, examples: Any, windows: Any) -> Any:
        def table(length: int) -> Any:
            return config.rope_table(length, numbers[0], "layer_band", numbers[1], "layer_band")

        answers = answer_loss(model, examples, table(flags.tokens))
        return answers + weight * text_loss(model, windows, table(flags.window), reference=model)

    step = jax.jit(jax.value_and_grad(loss))
    ones = jnp.ones((2, config.num_layers, config.rotary_dim // 2), jnp.float32)
    return lambda: step(ones, model, examples, windows)


if __name__ == "__main__":
    chosen = tyro.cli(BenchPackedFlags, description=__doc__)
    if chosen.cell:
        print(json.dumps(measure(chosen)))
    else:
        main(chosen)
