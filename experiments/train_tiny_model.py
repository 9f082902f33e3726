"""Train the small Llama that the project bundles: key-value retrieval with short hexadecimal keys, in the task's own template.

    python experiments/train_tiny_model.py --output runs/tiny        # the bundled model; one GPU, minutes
    python experiments/train_tiny_model.py --output runs/try --num-layers 2 --steps 100 --batch-tokens 2048 \\
        --check-rows 2 --eval-pairs 8 --eval-examples 20 --sweep 1 --probe 3 --probe-examples 5   # a try on a CPU

Prompts are made on the device (`tiny_prompts.py`), so no two batches are equal, and none comes from the generator of
`lpes_jax.tasks.key_value`, which makes the questions of every measurement.

Cause of the position bias: short prompts, 4 to 12 pairs (`--train-pairs`), ask for any pair half of the time and otherwise for
one near an end (`--edge-share`, `--edge-width`). Long prompts, 34 to 38 pairs (`--long-pairs`), which are 15 %
(`--long-share`), ask only for pairs in their first or last tenth (`--long-edge-share`). So training never asks for the middle
of a long prompt. RoPE is the same in training, in the saved folder and in the measurement.

Training has two parts. The first consists of stages, each of which lasts until `--stage-accuracy` of the values are completely
right: first JSON objects that repeat a few pairs (`--repeat-pairs`, `--repeat-distinct`; the loss includes the repetitions),
then few pairs, once each (`--stage-pairs`). Stages ask for all pairs equally often, with several questions after one JSON
object. The second part is the mixture above with one question per prompt, to the end. The loss covers each value, the quote
after it and the end of text. Digits of a key asked for have the weight `--key-weight`, because continuing a key that was seen
is half of retrieval, and fixed tokens have `--template-weight`.

The folder gets config.json, model.safetensors (bfloat16), the tokenizer's files, training.json (flags, versions, seconds, the
loss by step) and evaluation.json (`measure_tiny_model.py`).

Letters as in `tiny_prompts.py`, and V vocabulary.
"""

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import measure_tiny_model
import numpy as np
import optax
from flax import nnx
from grid import run_script
from jaxtyping import Array, Float, Int
from measure_tiny_model import POSITIONS, Measurement
from tiny_prompts import Conditions, Rows, Shape, Template, assemble, draw_content, make_template, make_tokenizer

from lpes_jax.errors import UserError
from lpes_jax.models.llama import Llama, LlamaConfig
from lpes_jax.models.llama.attention import causal_attention
from lpes_jax.models.llama.checkpoint import save_llama
from lpes_jax.models.llama.model import LayerContext, layer_rows, matmul, output_logits, rotated, run_layers
from lpes_jax.rope import RopeParameters, rope_table
from lpes_jax.store.provenance import environment
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.prompts import slot

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Settings(Measurement):
    """What to train, on what, and how; the defaults are the recipe of the bundled model."""

    seed: int = 0

    train_pairs: tuple[int, int] = (4, 12)
    """Fewest and most pairs of the short training prompts."""
    edge_share: float = 0.5
    """Share of questions about a pair near an end; the others are about any pair."""
    edge_width: float = 0.1
    """The share of the pairs that counts as near an end, at each end."""
    end_share: float = 0.5
    """The share of the questions near an end that ask for the last pairs, not the first."""
    long_share: float = 0.15
    """Share of training steps on long prompts."""
    long_pairs: tuple[int, int] = (34, 38)
    """Fewest and most pairs of the long training prompts."""
    long_edge_share: float = 1.0
    """`edge_share` of the long prompts."""

    repeat_pairs: int = 12
    """Most pairs in the first stage, which draws all pairs of a prompt from few; 0: no such stage."""
    repeat_distinct: int = 3
    """The number of those few pairs."""
    stage_pairs: tuple[int, ...] = (4, 12)
    """Most pairs (at least 2) in each later stage."""
    stage_questions: int = 4
    """Questions after one JSON object in the stages."""
    stage_shortest_key: int = 4
    """Keys of the stages have from this many characters to `key_length`."""
    stage_accuracy: float = 0.9
    """A stage ends when this share of the values of a report is completely right."""
    stage_limit: float = 0.6
    """The stages end after this share of the training at the latest."""

    num_layers: int = 10
    hidden_size: int = 192
    intermediate_size: int = 512
    num_heads: int = 6
    num_kv_heads: int = 3
    head_dim: int = 32
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048

    steps: int = 2500
    """Optimiser steps, in whole reports; the learning rate decays along a cosine."""
    batch_tokens: int = 32_768
    """Tokens per step."""
    learning_rate: float = 1e-3
    warmup_steps: int = 200
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    key_weight: float = 0.25
    """Weight of the digits of a key that was seen before in the loss."""
    template_weight: float = 0.05
    """Weight of the fixed tokens in the loss."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of the forward and backward pass (auto: bfloat16 on a GPU, else float32); trained weights are float32."""
    report_steps: int = 50
    """Steps per call of the device and line of the record."""
    check_reports: int = 10
    """Reports between two checks of the accuracy by position."""
    check_rows: int = 64
    """Prompts per position of such a check."""


def make_config(settings: Settings, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=-(-vocabulary // 32) * 32,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=settings.max_position_embeddings,
        rope=RopeParameters(rope_theta=settings.rope_theta),
        tie_word_embeddings=True,
    )


def initial_model(config: LlamaConfig, seed: int) -> Llama:
    """float32; weights of variance 1 / inputs; those added to the residual stream also divided by sqrt(2 L)."""

    def scaled(path: tuple[Any, ...], leaf: Array) -> Array:
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            return leaf
        inputs = config.hidden_size if "embed" in name else leaf.shape[-2]
        depth = 2 * config.num_layers if "output" in name or "down" in name else 1
        return leaf / 0.02 / math.sqrt(inputs * depth)  # `Llama` draws from a normal distribution of 0.02

    return jax.tree_util.tree_map_with_path(scaled, Llama(config, rngs=nnx.Rngs(seed), dtype=jnp.float32))


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW without its learning rate, which is an argument of each step."""

    def decays(model: Llama) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), model)

    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(settings.weight_decay, decays),
    )


def token_logits(model: Llama, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T V"]:
    """The model's logits with its weights rounded to `dtype`.

    This is `hidden_states`, except for the embedding, which is a product with one-hot rows: in 16 bits, the gradient of a
    lookup would sum thousands of rows per digit.
    """
    config = model.config
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), model)
    table = rope_table(config.rope, config.head_dim, config.num_layers)
    positions = jnp.arange(tokens.shape[1])

    def attend(q: Array, k: Array, v: Array, context: LayerContext) -> tuple[Array, None]:
        return causal_attention(*rotated(q, k, context.row, positions), v), None

    x = matmul(jax.nn.one_hot(tokens, config.vocab_size, dtype=dtype), narrow.embed[...])
    return output_logits(narrow, run_layers(narrow, x, layer_rows(config, table), attend)[0])


def predict(model: Llama, rows: Rows, dtype: Any) -> tuple[Float[Array, "B T"], Array]:
    """For every token but a row's first: the loss of its prediction in nats, and whether it is the most likely token."""
    logits = token_logits(model, rows.tokens, dtype)[:, :-1]
    wanted = rows.tokens[:, 1:]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
    ahead = ((0, 0), (1, 0))
    return jnp.pad(loss, ahead), jnp.pad(jnp.argmax(logits, axis=-1) == wanted, ahead)


def whole_values(rows: Rows, right: Array, questions: int) -> Array:
    """[B, Q]: whether all digits of the value are right."""
    wrong = rows.is_value & ~right
    return jnp.stack([~(wrong & (rows.question == question)).any(axis=1) for question in range(questions)], axis=1)


def batch_loss(
    model: Llama, rows: Rows, questions: int, key_weight: float, template_weight: float, dtype: Any
) -> tuple[Array, tuple[Array, Array]]:
    """The weighted mean loss, the loss of the values only, and the share of values that are completely right."""
    loss, right = predict(model, rows, dtype)
    weights = (rows.is_value | rows.is_close) + key_weight * rows.is_key + template_weight * rows.is_fixed
    value_loss = jnp.mean(loss, where=rows.is_value)
    return (loss * weights).sum() / weights.sum(), (value_loss, whole_values(rows, right, questions).mean())


@partial(jax.jit, static_argnames=("template", "shape", "settings", "dtype"), donate_argnames=("model", "moments"))
def train_steps(
    model: Llama,
    moments: optax.OptState,
    key: Array,
    learning_rates: Float[Array, "steps"],
    conditions: Conditions,
    template: Template,
    shape: Shape,
    settings: Settings,
    dtype: str,
) -> tuple[Llama, optax.OptState, tuple[Array, Array, Array]]:
    """One optimiser step per learning rate, on new rows; returns the loss, the values' loss and their accuracy of each."""
    optimizer = make_optimizer(settings)

    def step(carry: tuple[Any, optax.OptState], now: tuple[Array, Array]) -> tuple[Any, tuple[Array, Array, Array]]:
        model, moments = carry
        key, learning_rate = now
        rows = assemble(template, shape, draw_content(key, shape, conditions))
        gradient = jax.value_and_grad(batch_loss, has_aux=True)
        weights = settings.key_weight, settings.template_weight
        (loss, (value_loss, accuracy)), grads = gradient(model, rows, shape.questions, *weights, dtype)
        updates, moments = optimizer.update(grads, moments, model)
        model = jax.tree.map(lambda leaf, update: leaf - learning_rate * update, model, updates)
        return (model, moments), (loss, value_loss, accuracy)

    keys = jax.random.split(key, len(learning_rates))
    (model, moments), figures = jax.lax.scan(step, (model, moments), (keys, learning_rates))
    return model, moments, figures


@partial(jax.jit, static_argnames=("template", "shape", "dtype"))
def accuracy_by_position(model: Llama, key: Array, template: Template, shape: Shape, dtype: str) -> Float[Array, "5"]:
    """Accuracy at `POSITIONS`, on rows with all of the shape's pairs."""
    everywhere = Conditions((shape.pairs, shape.pairs), (shape.key_length, shape.key_length), 0.0, 0.0, 0.0)
    content = draw_content(key, shape, everywhere)
    slots = jnp.array([slot(position, shape.pairs) for position in POSITIONS], jnp.int32)
    slots = jnp.repeat(slots, shape.rows // len(POSITIONS))[:, None]
    rows = assemble(template, shape, dataclasses.replace(content, slots=slots))
    _, right = predict(model, rows, dtype)
    return whole_values(rows, right, 1).reshape(len(POSITIONS), -1).mean(axis=1)


def conditions_and_shapes(settings: Settings, template: Template) -> Iterator[tuple[str, Conditions, Shape]]:
    """The conditions and shapes of the stages in order, then of the short and the long prompts."""
    s = settings

    def shaped(
        pairs: tuple[int, int], shortest_key: int, edge_share: float, questions: int, distinct: int = 0
    ) -> tuple[Conditions, Shape]:
        shape = Shape(1, pairs[1], s.key_length, questions)
        rows = max(1, s.batch_tokens // shape.tokens(template))
        conditions = Conditions(pairs, (shortest_key, s.key_length), edge_share, s.edge_width, s.end_share, distinct)
        return conditions, shape._replace(rows=rows)

    shortest_key = min(s.stage_shortest_key, s.key_length)
    if s.repeat_pairs:
        yield "repeats", *shaped((2, s.repeat_pairs), shortest_key, 0.0, s.stage_questions, s.repeat_distinct)
    for most in s.stage_pairs:
        yield f"stage {most}", *shaped((2, most), shortest_key, 0.0, s.stage_questions)
    yield "short", *shaped(s.train_pairs, s.key_length, s.edge_share, 1)
    yield "long", *shaped(s.long_pairs, s.key_length, s.long_edge_share, 1)


def check(settings: Settings, template: Template) -> None:
    """Raise UserError for invalid settings."""
    s = settings
    if s.output.exists() and any(s.output.iterdir()):
        raise UserError(f"--output {s.output}: the folder is not empty; name another one")
    if min(s.stage_pairs, default=2) < 2 or s.repeat_pairs == 1:
        raise UserError("--stage-pairs and --repeat-pairs must be at least 2")
    for name, (fewest, most) in (("train-pairs", s.train_pairs), ("long-pairs", s.long_pairs)):
        if not 1 <= fewest <= most:
            raise UserError(f"--{name} must be the fewest and the most pairs, got {fewest} {most}")
    if not 1 <= s.stage_shortest_key:
        raise UserError(f"--stage-shortest-key must be at least 1, got {s.stage_shortest_key}")
    longest = max(shape.tokens(template) for _, _, shape in conditions_and_shapes(s, template))
    longest = max(longest, Shape(1, max(s.test_pairs, *s.eval_pairs), s.key_length, 1).tokens(template))
    if longest > s.max_position_embeddings:
        raise UserError(f"the longest prompt has {longest} tokens; raise --max-position-embeddings or use fewer pairs")
    for pairs in (s.test_pairs, *s.eval_pairs):
        KeyValue(pairs, key_length=s.key_length)


def train(settings: Settings, config: LlamaConfig, template: Template) -> tuple[Llama, dict[str, Any]]:
    """The trained model in float32, and the record of its training."""
    s = settings
    dtype = s.dtype if s.dtype != "auto" else "bfloat16" if jax.default_backend() == "gpu" else "float32"
    model: Any = initial_model(config, s.seed)
    moments = make_optimizer(s).init(model)
    key, watch_key = jax.random.split(jax.random.key(s.seed + 1))
    parts = list(conditions_and_shapes(s, template))
    stages, (short, long) = parts[:-2], parts[-2:]
    choose = np.random.default_rng(s.seed)
    watched = Shape(len(POSITIONS) * s.check_rows, s.test_pairs, s.key_length, 1)
    weights = sum(leaf.size for leaf in jax.tree.leaves(model))
    print(f"{weights:,} weights, {dtype}, {jax.devices()[0].device_kind}")
    for name, conditions, shape in parts:
        print(f"{name}: {shape.rows} rows of {shape.tokens(template)} tokens, {conditions}")

    started = time.monotonic()
    rates = jnp.zeros(s.report_steps, jnp.float32)
    lowered: dict[Shape | None, Any] = {
        shape: train_steps.lower(model, moments, key, rates, conditions, template, shape, s, dtype)
        for _, conditions, shape in parts
    }
    lowered[None] = accuracy_by_position.lower(model, key, template, watched, dtype)
    with ThreadPoolExecutor() as pool:  # XLA compiles them in parallel
        programs = dict(zip(lowered, pool.map(lambda program: program.compile(), lowered.values()), strict=True))
    print(f"{len(programs)} programs compiled in {time.monotonic() - started:.0f} s", flush=True)

    log: list[dict[str, Any]] = []
    step, stage = 0, 0
    while step < s.steps:
        progress = step / s.steps
        if progress > s.stage_limit:
            stage = len(stages)
        name, conditions, shape = stages[stage] if stage < len(stages) else long if choose.random() < s.long_share else short
        warm = np.minimum(1, (step + 1 + np.arange(s.report_steps)) / s.warmup_steps)
        rates = jnp.asarray(s.learning_rate * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2), jnp.float32)
        model, moments, figures = programs[shape](model, moments, jax.random.fold_in(key, step), rates, conditions)
        loss, value_loss, accuracy = (float(np.mean(figure)) for figure in figures)
        step += s.report_steps
        entry = {
            "step": step,
            "part": name,
            "loss": round(loss, 4),
            "value_loss": round(value_loss, 4),
            "accuracy": round(accuracy, 4),
            "seconds": round(time.monotonic() - started, 2),
        }
        if len(log) % s.check_reports == s.check_reports - 1:
            by_position = programs[None](model, jax.random.fold_in(watch_key, step))
            entry["accuracy_by_position"] = np.asarray(by_position).round(3).tolist()
        log.append(entry)
        print(json.dumps(entry), flush=True)
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss} after {step} steps; lower --learning-rate")
        if stage < len(stages) and accuracy >= s.stage_accuracy:
            stage += 1
    record = {
        "settings": dataclasses.asdict(s) | {"output": s.output.name},
        "weights": weights,
        "dtype": dtype,
        "steps": step,
        "seconds": round(time.monotonic() - started, 1),
        "final": log[-1] if log else None,
        **environment(),
        "log": log,
    }
    return model, record


def save(folder: Path, model: Llama, tokenizer: "PreTrainedTokenizerFast", record: dict[str, Any]) -> None:
    """Write the folder that `lpes_jax.models.llama.load` and transformers read, with the weights in bfloat16."""
    save_llama(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model), folder)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def main(settings: Settings) -> None:
    tokenizer = make_tokenizer()
    template = make_template(tokenizer)
    check(settings, template)
    model, record = train(settings, make_config(settings, len(tokenizer)), template)
    save(settings.output, model, tokenizer, record)
    measure_tiny_model.main(settings)


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
