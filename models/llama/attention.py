"""Causal self-attention over right-padded prompts and over groups of prompts, and attention of one new token over a cache.

With a sliding window of w, a query sees the last w keys, including the one at its own position, as in transformers.

Letters: B batch, T queries, S cached keys, H heads, K key-value heads (G = H / K heads share one), D head dim.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.mesh import over_heads

_BLOCK = 128  # queries per step on the CPU; times with 64 to 256 differed only by noise
_SPANS = 8  # parts of a text
# Bytes of attention logits in memory at once, of one block or of several short rows. On a CPU they must fit its caches: 64 MiB
# took up to twice as long.
_LOGITS_AT_ONCE = {"cpu": 2**20, "gpu": 2**27}


def causal_attention(
    q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], window: int | None = None
) -> Float[Array, "B T H D"]:
    """softmax(q k^T / sqrt(D)) v, each query over the keys up to its own position. Padding on the right needs no mask.

    Uses cuDNN's fused kernel if the default device is a GPU and the dtype has 16 bits, otherwise an exact blocked softmax.
    """
    return over_heads(partial(_device_attention, window=window), (q, k, v))


def _device_attention(q: Array, k: Array, v: Array, window: int | None) -> Array:
    if window is not None and window >= q.shape[1]:
        window = None
    if runs_on_cudnn(q.shape[-1], q.dtype):
        return with_even_length(partial(_cudnn_attention, window=window), q, k, v)
    return blocked_attention(q, k, v, window=window)


def _cudnn_attention(q: Array, k: Array, v: Array, window: int | None) -> Array:
    local = None if window is None else (window - 1, 0)  # keys on either side of the query's own
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local, implementation="cudnn")


def with_even_length(attend: Callable[[Array, Array, Array], Array], q: Array, k: Array, v: Array) -> Float[Array, "B T H D"]:
    """Causal attention of an odd number of tokens with one token of padding: cuDNN has no gradient for odd lengths."""
    length = q.shape[1]
    if length % 2 == 0:
        return attend(q, k, v)
    return attend(*(jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v)))[:, :length]


def runs_on_cudnn(head_dim: int, dtype: DTypeLike) -> bool:
    """Whether `causal_attention` uses cuDNN's kernel on the default device."""
    sixteen_bit = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    return jax.default_backend() == "gpu" and sixteen_bit and head_dim % 8 == 0 and head_dim <= 256


def blocked_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    block: int = _BLOCK,
    window: int | None = None,
) -> Float[Array, "B T H D"]:
    """Exact causal attention, a block of queries and a few rows at a time.

    The text is divided into at most `_SPANS` spans. Blocks of a span attend to the keys up to the span's end, from the first
    key that the window includes, so nearly half of the full product is never computed. Blocks run sequentially. If they were
    unrolled, XLA would run independent blocks at once, with the logits of all rows, heads and queries in memory.
    """
    batch, length, heads, head_dim = q.shape
    groups = heads // k.shape[2]
    span = block * -(-length // (_SPANS * block))
    at_once = max(1, min(batch, logits_at_once() // (4 * heads * min(block, length) * length)))

    def attend(q_and_start: tuple[Array, Array | int], k: Array, v: Array, first: int) -> Array:
        q, start = q_and_start  # [K, G, block, D], and the position of the first query; `first`: position of the first key
        logits = _einsum("kgtd,ksd->kgts", q, k) * (head_dim**-0.5)
        keys, queries = first + jnp.arange(k.shape[1])[None, :], start + jnp.arange(q.shape[2])[:, None]
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        weights = _softmax(jnp.where(seen, logits, -jnp.inf), q.dtype)
        return _einsum("kgts,ksd->kgtd", weights, v).astype(q.dtype)

    def row(qkv: tuple[Array, Array, Array]) -> Array:
        q, k, v = qkv
        q = q.reshape(length, -1, groups, head_dim).transpose(1, 2, 0, 3)  # [K, G, T, D]
        k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)  # [K, T, D]
        parts = []
        for start in range(0, length, span):
            end = min(start + span, length)
            rest = end - (end - start) % block
            first = 0 if window is None else max(0, start - window + 1)
            over_keys = partial(attend, k=k[:, first:end], v=v[:, first:end], first=first)
            if start < rest:
                blocks = jnp.moveaxis(q[:, :, start:rest].reshape(*q.shape[:2], -1, block, head_dim), 2, 0)
                attended = jax.lax.map(over_keys, (blocks, jnp.arange(start, rest, block)))
                parts.append(jnp.moveaxis(attended, 0, 2).reshape(*q.shape[:2], rest - start, head_dim))
            if rest < end:
                parts.append(over_keys((q[:, :, rest:end], rest)))
        return jnp.concatenate(parts, axis=2).transpose(2, 0, 1, 3).reshape(length, heads, head_dim)

    return jax.vmap(row)((q, k, v)) if at_once == batch else jax.lax.map(row, (q, k, v), batch_size=at_once)


def masked_attention(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    indices: Int[Array, "B S"],
    ends: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    window: int | None = None,
) -> Float[Array, "B S H D"]:
    """Exact attention of some tokens of each row: the query with index i sees the keys j with j <= i < ends[j].

    In a token tree in depth-first order, these keys are the query's path from the root. Uses cuDNN's kernel if possible (on one
    GPU), otherwise a block of queries and a few rows at a time.

    Args:
        q: Queries of the tokens `indices`.
        k: Keys of all tokens.
        v: Values of all tokens.
        indices: The index of each query's token in its row.
        ends: The end of the subtree of each token.
        positions: The position of each token in its prompt; a window counts these.
        window: The sliding window; None means none.
    """
    return over_heads(partial(_masked, window=window), (q, k, v), (indices, ends, positions))


def _masked(q: Array, k: Array, v: Array, indices: Array, ends: Array, positions: Array, window: int | None) -> Array:
    # Only on one GPU: on two, XLA crashed in Shardy's pass, with this kernel and with the blocks (jax 0.11.2, H200). GSPMD
    # compiles the kernel for two GPUs ahead of time, but that was not run.
    if window is None and q.shape[1] >= _BLOCK and runs_on_cudnn(q.shape[-1], q.dtype) and jax.device_count() == 1:
        return one_kernel(q, k, v, indices, ends)
    return blocked_masked_attention(q, k, v, indices, ends, positions, window)


def blocked_masked_attention(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    indices: Int[Array, "B S"],
    ends: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    window: int | None = None,
) -> Float[Array, "B S H D"]:
    """`masked_attention`, a block of queries and a few rows at a time, on every device."""
    batch, length, heads, head_dim = q.shape
    groups, query_bytes = heads // k.shape[2], 4 * heads * k.shape[1]  # the bytes of a query's logits
    most = _BLOCK if jax.default_backend() == "cpu" else max(_BLOCK, logits_at_once() // query_bytes)
    block = min(length, 32 * math.ceil(length / math.ceil(length / most) / 32))  # of about equal size
    at_once = max(1, min(batch, logits_at_once() // (query_bytes * block)))
    padding = -length % block  # queries that fill up the last block
    q, indices = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0))), jnp.pad(indices, ((0, 0), (0, padding)), mode="edge")

    def row(inputs: tuple[Array, Array, Array, Array, Array, Array]) -> Array:
        q, k, v, indices, ends, positions = inputs
        q = q.reshape(-1, block, k.shape[1], groups, head_dim).transpose(0, 2, 3, 1, 4)  # [blocks, K, G, block, D]
        k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)  # [K, T, D]
        keys = jnp.arange(k.shape[1])[None, :]

        def attend(q_and_indices: tuple[Array, Array]) -> Array:
            q, indices = q_and_indices
            seen = (keys <= indices[:, None]) & (indices[:, None] < ends)
            if window is not None:
                seen &= positions > positions[indices][:, None] - window
            logits = _einsum("kgtd,ksd->kgts", q, k) * (head_dim**-0.5)
            weights = _softmax(jnp.where(seen, logits, -jnp.inf), q.dtype)
            return _einsum("kgts,ksd->kgtd", weights, v).astype(q.dtype)

        blocks = q, indices.reshape(-1, block)
        out = attend((q[0], blocks[1][0]))[None] if len(q) == 1 else jax.lax.map(attend, blocks)
        return out.transpose(0, 3, 1, 2, 4).reshape(-1, heads, head_dim)[:length]

    inputs = q, k, v, indices, ends, positions
    return jax.vmap(row)(inputs) if at_once == batch else jax.lax.map(row, inputs, batch_size=at_once)


def _kernel(
    q: Float[Array, "B S H D"], k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], seen: Bool[Array, "B S T"]
) -> Float[Array, "B S H D"]:
    implementation = "cudnn" if runs_on_cudnn(q.shape[-1], q.dtype) else "xla"
    return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], implementation=implementation)


@custom_vmap
def _kernel_of_all(q: Array, k: Array, v: Array, seen: Array) -> Array:
    return _kernel(q, k, v, seen)


@_kernel_of_all.def_vmap
def _more_rows(size: int, batched: Sequence[bool], *operands: Array) -> tuple[Array, bool]:
    # JAX's own batching rule for cuDNN's kernel does not support a mask that all heads share.
    rows = [
        x.reshape(-1, *x.shape[2:]) if has_axis else jnp.tile(x, (size, *[1] * (x.ndim - 1)))
        for x, has_axis in zip(operands, batched, strict=True)
    ]
    out = _kernel_of_all(*rows)
    return out.reshape(size, -1, *out.shape[1:]), True


@jax.custom_vjp
def one_kernel(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    indices: Int[Array, "B S"],
    ends: Int[Array, "B T"],
) -> Float[Array, "B S H D"]:
    """`masked_attention` by cuDNN's fused kernel (or XLA's attention without cuDNN), under vmap too. Gradients: in blocks."""
    return _kernel_of_all(q, k, v, _seen(indices, ends))


def _seen(indices: Array, ends: Array) -> Bool[Array, "B S T"]:
    return (jnp.arange(ends.shape[1]) <= indices[:, :, None]) & (indices[:, :, None] < ends[:, None])


def _forward(q: Array, k: Array, v: Array, indices: Array, ends: Array) -> tuple[Array, Any]:
    """In blocks: cuDNN's gradient under a mask was not finite on Qwen2.5-Coder-0.5B (jax 0.11.2, H200, bfloat16)."""
    return jax.vjp(lambda q, k, v: blocked_masked_attention(q, k, v, indices, ends, jnp.zeros_like(ends)), q, k, v)


def _backward(pull_back: Any, cotangent: Array) -> tuple[Array | None, ...]:
    return (*pull_back(cotangent), None, None)


one_kernel.defvjp(_forward, _backward)


def logits_at_once(backend: str | None = None) -> int:
    """Bytes of attention logits of one individual that a device (None: the default one) holds at once."""
    return _LOGITS_AT_ONCE["cpu" if (backend or jax.default_backend()) == "cpu" else "gpu"]


def cached_attention(
    q: Float[Array, "B 1 H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    lengths: Int[Array, "B"],
    window: Int[Array, ""] | int | None = None,
) -> Float[Array, "B 1 H D"]:
    """Attention of one new token per row over the first `lengths` entries of its cache, or over the last `window` of these."""
    return over_heads(_cached, (q, k, v), (lengths, window))


def _cached(q: Array, k: Array, v: Array, lengths: Array, window: Array | int | None) -> Array:
    batch, _, heads, head_dim = q.shape
    q = q.reshape(batch, k.shape[2], heads // k.shape[2], head_dim)
    logits = _einsum("bkgd,bskd->bkgs", q, k) * (head_dim**-0.5)
    entries = jnp.arange(k.shape[1])[None, :]
    seen = entries < lengths[:, None]
    if window is not None:
        seen &= entries >= lengths[:, None] - window
    weights = _softmax(jnp.where(seen[:, None, None, :], logits, -jnp.inf), q.dtype)
    return _einsum("bkgs,bskd->bkgd", weights, v).astype(q.dtype).reshape(batch, 1, heads, head_dim)


def _softmax(logits: Array, dtype: jnp.dtype) -> Array:
    return jax.nn.softmax(logits, axis=-1).astype(dtype)


def _einsum(equation: str, a: Array, b: Array) -> Array:
    # Logits and sums are float32 (float64 for float64): attention in 16 bits is not accurate enough at far positions.
    wide = np.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(
        equation, a, b, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST if a.dtype == wide else None
    )
