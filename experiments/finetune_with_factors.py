"""Factors inside your own training step: jax, optax and `lj.logits`, in a minute on one CPU core.

    python experiments/finetune_with_factors.py --output-path runs/finetune
    python experiments/finetune_with_factors.py --train adapter --factors runs/finetune/factors.json --output-path runs/adapter

The first command trains one factor per layer on key-value questions and writes factors.json for the other verbs. The second
trains a low-rank adapter of the query weights, with found factors in use, and writes adapter.npz. The loss is -log p of an
answer's token, in nats, and is shown for other questions before and after.

Letters: B batch, T tokens, L layers, E embedding, Q query width, r rank.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from grid import run_script

import lpes_jax as lj
from lpes_jax.rope import Granularity
from lpes_jax.same_model import facts
from lpes_jax.tasks.key_value import KeyValue

RANK, LOWEST = 4, 0.1


@dataclass(frozen=True)
class Settings:
    """What to train, on what, and how."""

    model: str = "tiny-retriever"
    """A name in models/zoo, a folder in Hugging Face layout, a .gguf file, or a Hugging Face hub id."""
    train: Literal["factors", "adapter"] = "factors"
    """Factors per layer, or an adapter of the queries."""
    factors: Path | None = None
    """factors.json, or the zoo's by name, to start from (default: 1); they may be finer than per layer."""
    first_layer: int = 2
    """The first layer whose factor is trained: the first two of tiny-retriever need their positions."""
    num_pairs: int = 36
    """Pairs of a prompt; questions ask for those in its middle."""
    key_length: int | None = 8
    """Hexadecimal characters of keys and values (None: UUIDs)."""
    steps: int = 12
    """Steps of Adam."""
    batch_size: int = 4
    """Questions per step."""
    learning_rate: float = 0.2
    """Learning rate of factors; an adapter uses a hundredth."""
    output_path: Path = Path("runs/finetune")
    """Folder of the results."""


def loss(parameters: Any, model: lj.Llama, tokens: jax.Array, is_answer: jax.Array, granularity: Granularity) -> jax.Array:
    """Mean -log p of the answers' tokens, both [B, T], for the model with factors and an adapter [L, E, r] x [L, r, Q]."""
    adapted = jax.tree.map(lambda leaf: leaf, model)  # new modules around the same arrays
    adapted.layers.query = nnx.Param(model.layers.query[...] + parameters["down"] @ parameters["up"])
    logits = lj.logits(adapted, tokens, parameters["factors"], granularity)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return nats.mean(where=is_answer[:, 1:])


def batch(s: Settings, tokenizer: Any, split: Literal["search", "test"], seed: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Tokens of prompts with their answers, padded on the right, and a mask of the answers."""
    task, slots = KeyValue(s.num_pairs, s.key_length), np.linspace(s.num_pairs // 4, 3 * s.num_pairs // 4, count)
    prompts = [task.prompt(e, int(slot)) for e, slot in zip(task.examples(split, count, seed), slots, strict=True)]
    starts, ends = (
        tokenizer([getattr(p, part) for p in prompts], add_special_tokens=part == "text") for part in ("text", "gold")
    )
    pairs = list(zip(starts["input_ids"], ends["input_ids"], strict=True))
    longest = -(-max(len(start + end) for start, end in pairs) // 64) * 64  # few lengths, few compilations
    tokens = [start + end + [0] * (longest - len(start + end)) for start, end in pairs]
    positions = np.arange(longest)
    is_answer = [(positions >= len(start)) & (positions < len(start + end)) for start, end in pairs]
    return jnp.array(tokens, jnp.int32), jnp.array(is_answer)


def main(s: Settings) -> None:
    """Train, and print the change."""
    model, tokenizer = lj.load_model(s.model, "float32"), lj.load_tokenizer(s.model)
    config = model.config
    found = lj.LayerFactors.uniform(1.0, config.num_layers) if s.factors is None else lj.LayerFactors.load(s.factors)
    found.for_model(config.num_layers, config.num_kv_heads, config.rotary_dim, str(s.factors))
    layers, width, out = model.layers.query[...].shape
    down = jax.random.normal(jax.random.key(0), (layers, width, RANK)) / width**0.5
    factors = {"factors": jnp.asarray(found.factors, jnp.float32)}
    adapter = {"down": down, "up": jnp.zeros((layers, RANK, out))}
    trained, frozen, scale = (factors, adapter, 1.0) if s.train == "factors" else (adapter, factors, 0.01)
    optimizer = optax.adam(optax.cosine_decay_schedule(scale * s.learning_rate, s.steps))
    state = optimizer.init(trained)

    @jax.jit
    def value(trained: Any, model: lj.Llama, tokens: jax.Array, is_answer: jax.Array) -> jax.Array:
        return loss(trained | frozen, model, tokens, is_answer, found.granularity)

    @jax.jit
    def step(trained: Any, state: Any, model: lj.Llama, tokens: jax.Array, is_answer: jax.Array) -> tuple[Any, Any, jax.Array]:
        nats, gradient = jax.value_and_grad(value)(trained, model, tokens, is_answer)
        if "factors" in gradient:
            gradient["factors"] = gradient["factors"].at[: s.first_layer].set(0)
        updates, state = optimizer.update(gradient, state)
        trained = optax.apply_updates(trained, updates)
        if "factors" in trained:
            trained["factors"] = jnp.maximum(trained["factors"], LOWEST)
        return trained, state, nats

    test = batch(s, tokenizer, "test", 0, 4 * s.batch_size)
    before = value(trained, model, *test)
    for number in range(s.steps):
        trained, state, nats = step(trained, state, model, *batch(s, tokenizer, "search", number, s.batch_size))
        print(f"step {number + 1}/{s.steps}: {nats:.3f} nats", flush=True)
    print(f"other questions: {before:.3f} nats before, {value(trained, model, *test):.3f} after")
    s.output_path.mkdir(parents=True, exist_ok=True)
    if s.train == "factors":
        factors = np.asarray(trained["factors"], np.float64).round(4)
        record = {"model": {"name": s.model} | facts(config, tokenizer), "rope": config.rope.to_hf()}
        lj.LayerFactors(factors, found.granularity, **record).save(s.output_path / "factors.json")
    else:
        np.savez(s.output_path / "adapter.npz", down=trained["down"], up=trained["up"])


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
