"""Causal self-attention over right-padded prompts and over trees of them, and attention of one new token over a cache.

A sliding window of w lets a query see the last w keys up to its own position, itself among them, as transformers counts.

Letters: B batch, T queries, S cached keys, H heads, K key-value heads (G = H / K heads share one), D head dim.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.mesh import over_heads

_BLOCK = 128  # queries a step on the CPU; 64 to 256 measured within noise of each other
_SPANS = 8
# Keys under a mask, up to which cuDNN's kernel is differentiated. Alone it is right with 4,544 and with 11,648; a search on
# prompts of 10,700 tokens had a loss that was not finite, and why is not known.
_KEYS_OF_A_GRADIENT = 4608
# Bytes of attention logits that are in memory together, of one block or of several short rows. On a CPU its caches must hold
# them: 64 MiB took up to twice as long.
_LOGITS_AT_ONCE = {"cpu": 2**20, "gpu": 2**27}


def causal_attention(
    q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], window: int | None = None
) -> Float[Array, "B T H D"]:
    """softmax(q k^T / sqrt(D)) v, each query over the keys up to its own position. Padding on the right needs no mask.

    cuDNN's fused kernel where the default device is a GPU and the dtype has 16 bits; elsewhere an exact blocked softmax.
    """
    return over_heads(partial(_of_device, window=window), (q, k, v))


def _of_device(q: Array, k: Array, v: Array, window: int | None) -> Array:
    if window is not None and window >= q.shape[1]:
        window = None
    if runs_on_cudnn(q.shape[-1], q.dtype):
        local = None if window is None else (window - 1, 0)  # keys on either side of the query's own
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local, implementation="cudnn")
    return blocked_attention(q, k, v, window=window)


def runs_on_cudnn(head_dim: int, dtype: DTypeLike) -> bool:
    """Whether `causal_attention` takes cuDNN's kernel on the default device."""
    sixteen_bit = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    return jax.default_backend() == "gpu" and sixteen_bit and head_dim % 8 == 0 and head_dim <= 256


def blocked_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    block: int = _BLOCK,
    window: int | None = None,
) -> Float[Array, "B T H D"]:
    """Exact causal attention, a block of queries at a time, a few rows at a time.

    The blocks of one of at most `_SPANS` spans meet the keys up to the span's end, and from the first that a window leaves in
    sight: nearly half of the full product is never computed. They go one after the other, so that the logits of all rows,
    heads and queries are never in memory together, as they would be if all blocks were unrolled: XLA runs at once what does
    not depend on each other.
    """
    batch, length, heads, head_dim = q.shape
    groups = heads // k.shape[2]
    span = block * -(-length // (_SPANS * block))
    at_once = max(1, min(batch, logits_at_once() // (4 * heads * min(block, length) * length)))

    def attend(q_and_start: tuple[Array, Array | int], k: Array, v: Array, first: int) -> Array:
        q, start = q_and_start  # [K, G, block, D], and the position of the first query; `first` is that of the first key
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
    at: Int[Array, "B S"],
    ends: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    window: int | None = None,
) -> Float[Array, "B S H D"]:
    """Attention of some tokens of each row: the query at index `at` sees the keys j with j <= at < ends[j].

    In a tree of prompts, written depth first, these are the query's own path: `ends` is where the tokens below a token end.
    `positions` are what a window counts in. Exact: cuDNN's kernel where it can be (one GPU), else a block of queries and a few
    rows at a time.
    """
    return over_heads(partial(_masked, window=window), (q, k, v), (at, ends, positions))


def _masked(q: Array, k: Array, v: Array, at: Array, ends: Array, positions: Array, window: int | None) -> Array:
    # One GPU: on two XLA crashed in Shardy's pass, with this kernel as with the blocks (jax 0.11.2, H200). GSPMD compiles the
    # kernel for two ahead of time; it was not run so.
    if window is None and q.shape[1] >= _BLOCK and runs_on_cudnn(q.shape[-1], q.dtype) and jax.device_count() == 1:
        return one_kernel(q, k, v, at, ends)
    return blocked_masked_attention(q, k, v, at, ends, positions, window)


def blocked_masked_attention(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    at: Int[Array, "B S"],
    ends: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    window: int | None = None,
) -> Float[Array, "B S H D"]:
    """`masked_attention` a block of queries and a few rows at a time, everywhere."""
    batch, length, heads, head_dim = q.shape
    groups, of_query = heads // k.shape[2], 4 * heads * k.shape[1]  # the bytes of a query's logits
    most = _BLOCK if jax.default_backend() == "cpu" else max(_BLOCK, logits_at_once() // of_query)
    block = min(length, 32 * math.ceil(length / math.ceil(length / most) / 32))  # all about as large
    at_once = max(1, min(batch, logits_at_once() // (of_query * block)))
    padding = -length % block  # queries of the last block that stand in for none
    q, at = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0))), jnp.pad(at, ((0, 0), (0, padding)), mode="edge")

    def row(inputs: tuple[Array, Array, Array, Array, Array, Array]) -> Array:
        q, k, v, at, ends, positions = inputs
        q = q.reshape(-1, block, k.shape[1], groups, head_dim).transpose(0, 2, 3, 1, 4)  # [blocks, K, G, block, D]
        k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)  # [K, T, D]
        keys = jnp.arange(k.shape[1])[None, :]

        def attend(q_and_at: tuple[Array, Array]) -> Array:
            q, at = q_and_at
            seen = (keys <= at[:, None]) & (at[:, None] < ends)
            if window is not None:
                seen &= positions > positions[at][:, None] - window
            logits = _einsum("kgtd,ksd->kgts", q, k) * (head_dim**-0.5)
            weights = _softmax(jnp.where(seen, logits, -jnp.inf), q.dtype)
            return _einsum("kgts,ksd->kgtd", weights, v).astype(q.dtype)

        blocks = q, at.reshape(-1, block)
        out = attend((q[0], blocks[1][0]))[None] if len(q) == 1 else jax.lax.map(attend, blocks)
        return out.transpose(0, 3, 1, 2, 4).reshape(-1, heads, head_dim)[:length]

    inputs = q, k, v, at, ends, positions
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
    # JAX's own rule for cuDNN's kernel cannot batch a mask that all heads share.
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
    at: Int[Array, "B S"],
    ends: Int[Array, "B T"],
) -> Float[Array, "B S H D"]:
    """`masked_attention` by cuDNN's fused kernel (XLA's attention where there is none), also vmapped; or its gradient."""
    return _kernel_of_all(q, k, v, _seen(at, ends))


def _seen(at: Array, ends: Array) -> Bool[Array, "B S T"]:
    return (jnp.arange(ends.shape[1]) <= at[:, :, None]) & (at[:, :, None] < ends[:, None])


def _forward(q: Array, k: Array, v: Array, at: Array, ends: Array) -> tuple[Array, Any]:
    if k.shape[1] > _KEYS_OF_A_GRADIENT:
        return jax.vjp(lambda q, k, v: blocked_masked_attention(q, k, v, at, ends, jnp.zeros_like(ends)), q, k, v)
    return jax.vjp(partial(_kernel, seen=_seen(at, ends)), q, k, v)


def _backward(pull_back: Any, of_output: Array) -> tuple[Array | None, ...]:
    return (*pull_back(of_output), None, None)


one_kernel.defvjp(_forward, _backward)


def logits_at_once() -> int:
    """Bytes of attention logits that the default device holds of one individual."""
    return _LOGITS_AT_ONCE["cpu" if jax.default_backend() == "cpu" else "gpu"]


def cached_attention(
    q: Float[Array, "B 1 H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    lengths: Int[Array, "B"],
    window: Int[Array, ""] | int | None = None,
) -> Float[Array, "B 1 H D"]:
    """Attention of one new token a row over the first `lengths` entries of its cache, or the last `window` of those."""
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
    # Logits and sums in float32 (float64 for float64): 16-bit attention loses exactly the far positions that we measure.
    wide = np.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(
        equation, a, b, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST if a.dtype == wide else None
    )
