"""A forward pass of a large shape with random weights: ours, the GPU's matrix products, and transformers (torch), in one run.

    python experiments/bench_shapes.py --shape llama-2-7b --batch-size 8 --tokens 2048

Prompts of random tokens, all of one length, and logits of the last position. TFLOP/s count the layers' products and causal
attention (the half that is not masked). The matrix product is 8,192 cubed, bfloat16. transformers runs its default attention
(SDPA) eagerly, then through torch.compile. Medians of --rounds, after a first run of each for compilation and kernels.

The script then times alternatives for parts of the forward pass in isolation: products of queries, keys and values, and of gate
and up, with weights concatenated into one matrix or one after the other; attention by cuDNN's kernel or XLA's blocks, causal
and masked.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory of the same card
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from typing import Any, Literal  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from grid import run_script  # noqa: E402
from table05_latency import config_of, random_model  # noqa: E402

from lpes_jax.models.llama import Llama, LlamaConfig  # noqa: E402
from lpes_jax.models.llama.attention import (  # noqa: E402
    blocked_attention,
    blocked_masked_attention,
    causal_attention,
    masked_attention,
)
from lpes_jax.models.llama.model import hidden_states, matmul, output_logits  # noqa: E402
from lpes_jax.store.provenance import environment  # noqa: E402


@dataclass(frozen=True)
class Settings:
    """What to time."""

    shape: Literal["llama-2-7b", "llama-2-13b", "qwen2.5-7b"] = "llama-2-7b"
    batch_size: int = 8
    tokens: int = 2048
    rounds: int = 10
    matrix: int = 8192
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    torch: bool = True
    """Also time transformers, eager and compiled."""
    layers: int | None = None
    """A smaller number of layers, for trials."""


def main(s: Settings) -> None:
    config = config_of(s.shape)
    config = replace(config, num_layers=s.layers or config.num_layers)
    print(environment()["devices"], environment()["versions"])
    product_rate = matrix_rate(s)
    print(f"matrix product of {s.matrix:,} cubed, {s.dtype}: {product_rate / 1e12:.0f} TFLOP/s")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (s.batch_size, s.tokens), np.int32)
    model, work = random_model(config, 0, s.dtype), flop(config, s)

    @jax.jit
    def last_logits(model: Llama, tokens: jax.Array) -> jax.Array:
        return output_logits(model, hidden_states(model, tokens, config.rope_table(s.tokens))[:, -1])

    ours = median(lambda: last_logits(model, tokens).block_until_ready(), s.rounds)
    rate = work / ours
    print(
        f"lpes_jax: {1e3 * ours:.0f} ms, {rate / 1e12:.0f} TFLOP/s, "
        f"{100 * rate / product_rate:.0f} % of the matrix product's rate"
    )
    del model
    for name, (taken, alternative) in (products(s, config) | attentions(s, config)).items():
        print(f"{name}: {1e3 * taken:.3f} ms as it is, {1e3 * alternative:.3f} ms otherwise, {alternative / taken:.2f} x")
    if s.torch:
        for name, seconds in torch_seconds(s, config, tokens).items():
            print(f"{name}: {1e3 * seconds:.0f} ms, {seconds / ours:.2f} x ours")


def flop(config: LlamaConfig, s: Settings) -> float:
    """Multiplications and additions of a pass, without those of the output layer."""
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    keys = 2 * config.num_kv_heads * config.head_dim
    weights = width * (2 * heads + keys) + 3 * width * config.intermediate_size
    attention = 2 * heads * (s.tokens + 1) / 2
    return 2.0 * config.num_layers * s.batch_size * s.tokens * (weights + attention)


def matrix_rate(s: Settings) -> float:
    """FLOP per second of one large product of random matrices."""
    left, right = jax.random.normal(jax.random.key(0), (2, s.matrix, s.matrix), jnp.dtype(s.dtype))
    product = jax.jit(lambda left, right: left @ right)
    return 2.0 * s.matrix**3 / median(lambda: product(left, right).block_until_ready(), s.rounds)


def products(s: Settings, config: LlamaConfig) -> dict[str, tuple[float, float]]:
    """Seconds of products with the weights of a layer, one after the other and concatenated."""
    width, dtype = config.hidden_size, jnp.dtype(s.dtype)
    x = jax.random.normal(jax.random.key(0), (s.batch_size * s.tokens, width), dtype)
    heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    one_by_one = jax.jit(lambda x, weights: [matmul(x, matrix) for matrix in weights])
    seconds = {}
    for name, sizes in (
        ("queries, keys and values", (heads, keys, keys)),
        ("gate and up", (config.intermediate_size,) * 2),
    ):
        weights = [jax.random.normal(jax.random.key(1), (width, size), dtype) for size in sizes]
        whole, cuts = jnp.concatenate(weights, axis=1), [sum(sizes[: index + 1]) for index in range(len(sizes) - 1)]
        fused = jax.jit(lambda x, whole, cuts=tuple(cuts): jnp.split(matmul(x, whole), cuts, axis=1))
        seconds[name] = (
            median(lambda weights=weights: jax.block_until_ready(one_by_one(x, weights)), s.rounds),
            median(lambda fused=fused, whole=whole: jax.block_until_ready(fused(x, whole)), s.rounds),
        )
    return seconds


def attentions(s: Settings, config: LlamaConfig) -> dict[str, tuple[float, float]]:
    """Seconds of one layer's attention: as in the model, and in XLA's blocks. The mask is causal."""
    shape = s.batch_size, s.tokens, config.num_heads, config.head_dim
    q, k, v = jax.random.normal(jax.random.key(0), (3, *shape), jnp.dtype(s.dtype))
    k, v = k[:, :, : config.num_kv_heads], v[:, :, : config.num_kv_heads]
    ends = jnp.full(shape[:2], s.tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(s.tokens, dtype=jnp.int32), shape[:2])
    causal, blocks = jax.jit(causal_attention), jax.jit(blocked_attention)
    masked, masked_blocks = jax.jit(masked_attention), jax.jit(blocked_masked_attention)
    return {
        "causal attention": (
            median(lambda: causal(q, k, v).block_until_ready(), s.rounds),
            median(lambda: blocks(q, k, v).block_until_ready(), s.rounds),
        ),
        "masked attention": (
            median(lambda: masked(q, k, v, positions, ends, positions).block_until_ready(), s.rounds),
            median(lambda: masked_blocks(q, k, v, positions, ends, positions).block_until_ready(), s.rounds),
        ),
    }


def torch_seconds(s: Settings, config: LlamaConfig, tokens: np.ndarray) -> dict[str, float]:
    """Seconds of transformers' model of the same shape, with its own random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = AutoConfig.for_model(
        config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(sizes, dtype=getattr(torch, s.dtype)).eval()
        ids = torch.tensor(tokens, dtype=torch.long)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def run(forward: Callable[..., Any]) -> Callable[[], None]:
        def once() -> None:
            forward(input_ids=ids, use_cache=False, logits_to_keep=1)
            wait()

        return once

    with torch.inference_mode():
        eager = median(run(model), s.rounds)
        compiled: Any = torch.compile(model)
        return {"transformers, eager": eager, "transformers, torch.compile": median(run(compiled), s.rounds)}


def median(run: Callable[[], Any], rounds: int) -> float:
    """The median seconds of a run, after one warm-up."""
    run()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
