"""-log p of each token of plain text, which gives perplexity and text losses; and the KL divergence from the plain model.

Letters: n tables of a method, B rows, T tokens, S = T - 1, C positions of a chunk, E embedding.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, Shaped

from lpes_jax.finite import not_finite
from lpes_jax.mesh import BY_POPULATION, EVERYWHERE, mesh_of, over_population, put
from lpes_jax.models.llama.method import Method, table_method
from lpes_jax.models.llama.model import Llama, hidden_states, method_logits, method_model, over_tables


def token_nll(
    model: Llama, tokens: Int[Array, "B T"], method: Method, chunk: int = 256, *, remat: bool = False
) -> Float[Array, "B T"]:
    """-log p of each token in nats, float32; 0 for the first token of a row, which nothing predicts.

    On a mesh, the rows are distributed over it, and the result is replicated.

    Args:
        model: The model.
        tokens: Token ids.
        method: The RoPE tables or attention to use.
        chunk: Positions of every row whose logits are in memory at once.
        remat: See `hidden_states`; for gradients.
    """
    mesh = mesh_of(model)
    if mesh is None or mesh.size == 1:
        return _token_nll(model, tokens, method, chunk, remat=remat)
    shards = mesh.shape["population"]
    filled = np.resize(np.asarray(tokens), (-(-len(tokens) // shards) * shards, tokens.shape[1]))
    everywhere, by_rows = (NamedSharding(mesh, spec) for spec in (EVERYWHERE, BY_POPULATION))
    return _spread_nll(model, put(filled, by_rows), put(method, everywhere), chunk, remat, mesh)[: len(tokens)]


def token_divergence(
    model: Llama,
    tokens: Int[Array, "B T"],
    method: Method,
    own_model: Llama,
    own: Method,
    chunk: int = 256,
    *,
    remat: bool = False,
) -> Float[Array, "B T"]:
    """KL(p || q) of the distributions of each token, in nats, float32; 0 for a row's first, which nothing predicts.

    The models are on one device. The memory is that of `token_nll`, with twice the logits.

    Args:
        model: The model of q.
        tokens: Token ids.
        method: The RoPE tables or attention of q.
        own_model: The model of the reference p, which has no gradient.
        own: The RoPE tables or attention of p.
        chunk: See `token_nll`.
        remat: See `token_nll`.
    """
    hidden = _hidden(model, tokens, method, remat)
    reference = jax.lax.stop_gradient(_hidden(own_model, tokens, own, remat=False))

    def divergence(changed: Float[Array, "n B C E"], as_is: Float[Array, "n B C E"]) -> Float[Array, "B C"]:
        log_q = jax.nn.log_softmax(method_logits(model, changed, method), axis=-1)
        log_p = jax.lax.stop_gradient(jax.nn.log_softmax(method_logits(own_model, as_is, own), axis=-1))
        return (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)

    return _by_chunks(divergence, chunk, hidden, reference, remat=remat)


def check_text(model: Llama, windows: Int[Array, "W T"] | Int[np.ndarray, "W T"]) -> None:
    """Raise UserError if the plain model's logits are not finite on some window. Call it after a failure on the text."""
    method = table_method(model.config.rope_table(windows.shape[1]))
    for window in np.asarray(windows):
        if not np.isfinite(np.asarray(token_nll(model, jnp.asarray(window[None], jnp.int32), method))).all():
            raise not_finite(model, [window.tolist()])


@partial(jax.jit, static_argnames=("chunk", "remat", "mesh"))
def _spread_nll(
    model: Llama, tokens: Int[Array, "B T"], method: Method, chunk: int, remat: bool, mesh: Mesh
) -> Float[Array, "B T"]:
    nll = over_population(
        lambda *inputs: _token_nll(*inputs, chunk, remat=remat), mesh, (EVERYWHERE, BY_POPULATION, EVERYWHERE), BY_POPULATION
    )
    return jax.lax.with_sharding_constraint(nll(model, tokens, method), NamedSharding(mesh, EVERYWHERE))


@partial(jax.jit, static_argnames=("chunk", "remat"))
def _token_nll(
    model: Llama, tokens: Int[Array, "B T"], method: Method, chunk: int, *, remat: bool = False
) -> Float[Array, "B T"]:
    def nll(hidden: Float[Array, "n B C E"], wanted: Int[Array, "1 B C"]) -> Float[Array, "B C"]:
        logits = method_logits(model, hidden, method)
        return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, wanted[0][..., None], axis=-1)[..., 0]

    return _by_chunks(nll, chunk, _hidden(model, tokens, method, remat), tokens[None, :, 1:], remat=remat)


def _hidden(model: Llama, tokens: Int[Array, "B T"], method: Method, remat: bool) -> Float[Array, "n B _S E"]:
    """The hidden states that predict each token except the first, for each of the method's tables."""
    run = partial(hidden_states, method_model(model, method), tokens, remat=remat, replacement=method.replacement)
    return over_tables(run, method.tables)[:, :, :-1]


def _by_chunks(
    values: Callable[..., Float[Array, "B C"]], chunk: int, *parts: Shaped[Array, "_n B _S *_any"], remat: bool
) -> Float[Array, "B T"]:
    """`values` of all parts, `chunk` positions at a time, after a 0 for the first token."""
    batch, length = parts[0].shape[1:3]
    chunk = min(chunk, length)

    def cut(part: Shaped[Array, "n B S *any"]) -> Shaped[Array, "chunks n B _C *any"]:
        padding = ((0, 0), (0, 0), (0, -length % chunk)) + ((0, 0),) * (part.ndim - 3)
        return jnp.moveaxis(jnp.pad(part, padding).reshape(*part.shape[:2], -1, chunk, *part.shape[3:]), 2, 0)

    function = jax.checkpoint(values) if remat else values
    found = jax.lax.map(lambda cuts: function(*cuts), tuple(map(cut, parts)))
    return jnp.pad(found.swapaxes(0, 1).reshape(batch, -1)[:, :length], ((0, 0), (1, 0)))
