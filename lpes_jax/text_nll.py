"""-log p of each token of plain text, from which perplexity and text losses are computed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from lpes_jax.finite import not_finite
from lpes_jax.mesh import BY_POPULATION, EVERYWHERE, mesh_of, over_population, put
from lpes_jax.models.llama.method import Method, of_table
from lpes_jax.models.llama.model import Llama, hidden_states, method_logits, over_tables


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


def check_text(model: Llama, windows: Int[Array, "W T"] | Int[np.ndarray, "W T"]) -> None:
    """Raise UserError if the plain model's logits are not finite on some window. Call it after a failure on the text."""
    method = of_table(model.config.rope_table(windows.shape[1]))
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
    run = partial(hidden_states, model, tokens, remat=remat, replacement=method.replacement)
    hidden = over_tables(run, method.tables)[:, :, :-1]
    tables, batch, length, width = hidden.shape
    chunk = min(chunk, length)
    padding = -length % chunk
    hidden = jnp.pad(hidden, ((0, 0), (0, 0), (0, padding), (0, 0))).reshape(tables, batch, -1, chunk, width)
    wanted = jnp.pad(tokens[:, 1:], ((0, 0), (0, padding))).reshape(batch, -1, chunk).swapaxes(0, 1)

    def nll(hidden_and_wanted: tuple[Array, Array]) -> Array:
        hidden, wanted = hidden_and_wanted
        logits = method_logits(model, hidden, method)
        return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]

    values = jax.lax.map(jax.checkpoint(nll) if remat else nll, (jnp.moveaxis(hidden, 2, 0), wanted))
    values = values.swapaxes(0, 1).reshape(batch, -1)[:, :length]
    return jnp.pad(values, ((0, 0), (1, 0)))
