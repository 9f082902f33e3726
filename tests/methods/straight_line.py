"""A Llama in float64 NumPy, one prompt and one head at a time, and code that the tests of replaced attentions share."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lpes_jax.generation import generate_ids
from lpes_jax.methods import Maker
from lpes_jax.models.llama import Llama, LlamaConfig
from lpes_jax.models.llama.method import Method, table_method
from lpes_jax.models.llama.model import hidden_states, layer_rows, method_logits, method_model, over_tables
from lpes_jax.rope import RopeParameters

LENGTH = 48
LENGTHS = jnp.array([40, 23, 31, 9], jnp.int32)
PROMPTS = [np.random.default_rng(length).integers(0, 49, length).tolist() for length in (40, 23, 31, 9)]

# (layer, q [T, H, D], k [T, K, D], v [T, K, D]; q and k of scaled channels, where there are) -> [T, H, D]
Attend = Callable[..., np.ndarray]


@cache
def random_model(num_kv_heads: int) -> Llama:
    """4 heads of 8, 3 layers; weights so large that positions matter. A model each: compiled functions are shared."""
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=40,
        num_layers=3,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        rope=RopeParameters(rope_theta=10_000.0),
    )
    model = Llama(config, rngs=nnx.Rngs(num_kv_heads))
    model.layers = jax.tree.map(lambda leaf: leaf * 10 if leaf.ndim > 2 else leaf, model.layers)
    for leaf, factor in ((model.embed, 50), (model.head, 10)):
        leaf[...] = leaf[...] * factor
    return model


def numpy_logits(model: Llama, ids: list[int], attend: Attend, channels: np.ndarray | None = None) -> np.ndarray:
    """The logits `[T, V]` of one prompt; `attend` gets q and k of hidden states times `channels` `[L, E]` too."""
    config, layers = model.config, model.layers

    def weight(leaf) -> np.ndarray:
        return np.asarray(leaf[...], np.float64)

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_norm_eps) * scale

    x = weight(model.embed)[ids]
    for layer in range(config.num_layers):
        h = norm(x, weight(layers.attention_norm)[layer])
        inputs = [(h, layers.query), (h, layers.key), (h, layers.value)]
        if channels is not None:
            inputs += [(h * channels[layer], layers.query), (h * channels[layer], layers.key)]
        projected = ((states @ weight(leaf)[layer]).reshape(len(ids), -1, config.head_dim) for states, leaf in inputs)
        x = x + attend(layer, *projected).reshape(len(ids), -1) @ weight(layers.output)[layer]
        h = norm(x, weight(layers.mlp_norm)[layer])
        gate = h @ weight(layers.gate)[layer]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ weight(layers.up)[layer])) @ weight(layers.down)[layer]
    return norm(x, weight(model.norm)) @ weight(model.head)


def turned(x: np.ndarray, positions: np.ndarray, theta: float = 10_000.0) -> np.ndarray:
    """`[T, D]` rotated to `positions` (not only whole ones): element i pairs with i + D/2."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions, np.float64)[:, None] * theta ** (-np.arange(half) / half)
    pairs = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def causal(scores: np.ndarray) -> np.ndarray:
    """Weights of `[T, T]` scores q k, each row over the keys up to its own."""
    return softmax(np.where(np.tri(len(scores), dtype=bool), scores, -np.inf))


@jax.jit
def method_logits_of(model: Llama, tokens: jax.Array, lengths: jax.Array, method: Method) -> jax.Array:
    """The logits `[B, T, V]` of padded prompts."""
    model = method_model(model, method)
    run = partial(hidden_states, model, tokens, replacement=method.replacement, lengths=lengths)
    return method_logits(model, over_tables(run, method.tables), method)


def padded(prompts: list[list[int]]) -> jax.Array:
    """Prompts with padding that a mistake would show, `[B, LENGTH]`."""
    tokens = np.full((len(prompts), LENGTH), 49, np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    return jnp.asarray(tokens)


def logits_of(model: Llama, method: Method | None = None) -> np.ndarray:
    """Of PROMPTS, `[B, LENGTH, V]`; by the plain model without a method."""
    method = table_method(model.config.rope_table(LENGTH)) if method is None else method
    return np.asarray(method_logits_of(model, padded(PROMPTS), LENGTHS, method))


def correlation_in_bfloat16(model: Llama, method: Method) -> float:
    """Of the first prompt's logits in bfloat16 and in float32."""
    small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)
    return np.corrcoef(*(logits_of(weights, method)[0, :40].ravel() for weights in (small, model)))[0, 1]


def assert_decode_is_prefill(model: Llama, maker: Maker) -> None:
    """In layer 1, a token's attention over a cache is that of the pass over the whole text, also after the prompt."""
    config, method = model.config, maker(model.config, LENGTH)
    assert method.replacement is not None
    layers = layer_rows(config, jax.tree.map(lambda leaf: leaf[0], method.tables), method.replacement)
    layer, attention = jax.tree.map(lambda leaf: leaf[1], layers), method.replacement.attention
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (4, LENGTH, heads, config.head_dim))
        for key, heads in zip(keys, (config.num_heads, config.num_kv_heads, config.num_kv_heads), strict=True)
    )
    whole, state = jax.jit(attention.prefill)(layer, q, k, v, LENGTHS)
    decode, rows = jax.jit(attention.decode), jnp.arange(4)
    for positions in (LENGTHS, jnp.array([47, 42, 0, 10], jnp.int32)):
        one = decode(layer, state, q[rows, positions][:, None], k, v, positions)
        np.testing.assert_allclose(one[:, 0], whole[rows, positions], atol=1e-5)


def generated_and_recomputed(model: Llama, maker: Maker, count: int = 6) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy continuations of PROMPTS: with a cache, and each token from a pass over everything before it."""
    rows, method = [list(ids) for ids in PROMPTS], maker(model.config, LENGTH)
    for _ in range(count):
        logits = np.asarray(method_logits_of(model, padded(rows), LENGTHS, method))  # LENGTHS: of the prompts, as ever
        for row, ids in enumerate(rows):
            last = logits[row, len(ids) - 1]
            assert np.diff(np.sort(last)[-2:]) > 3e-4  # no tie that rounding may decide
            ids.append(int(last.argmax()))
    with_cache = generate_ids(model, PROMPTS, make_method=lambda length: maker(model.config, length), max_new_tokens=count)
    return with_cache, [ids[len(prompt) :] for ids, prompt in zip(rows, PROMPTS, strict=True)]
