"""How much fits into a pass: a model of what its activations take, and what the device has free.

The model counts, for each token of an individual, the arrays of one layer that are alive together: copies of the hidden state,
of queries, keys and values, and of the MLP's. Beside them stand float32 logits of the positions that are read, with their
softmax, and the attention logits that are held at once. Half of the free memory is planned with. Where that was too much after
all, the pass fails with an error that `out_of_memory` knows, and is done again in smaller ones.
"""

from typing import NamedTuple

import jax

from lpes_jax.mesh import least, mesh_of
from lpes_jax.models.llama.attention import logits_at_once
from lpes_jax.models.llama.model import Llama

_BUSY = 2**47  # FLOP of a pass that is to keep a large GPU busy: seen for a 7B shape, assumed for others
_COMPILATION = {"cpu": 2**38, "gpu": 2**51}  # FLOP of the seconds that a program of all layers takes to compile
_CPU_MEMORY = 2**31  # bytes that activations may take where the device does not say how much it has


def out_of_memory(error: Exception) -> bool:
    """Whether this is XLA's complaint that the device's memory is used up."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def planned_memory() -> int:
    """Bytes that a pass may take. Of several processes all ask, and get the least."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return least((stats["bytes_limit"] - stats["bytes_in_use"]) // 2 if "bytes_limit" in stats else _CPU_MEMORY)


class PassMemory(NamedTuple):
    """Bytes of one individual's pass: for each of its tokens, for each token whose logits are read, and beside them."""

    token: int
    read: int
    fixed: int

    def bytes(self, tokens: int, read: int) -> int:
        """Of a pass over so many tokens, with logits of `read` of them."""
        return tokens * self.token + read * self.read + self.fixed


def pass_memory(model: Llama, *, cached: bool = False) -> PassMemory:
    """What a pass takes on each device, with or without a cache.

    The devices of a model axis share all but the hidden states and logits.
    """
    config, itemsize, mesh = model.config, model.embed[...].dtype.itemsize, mesh_of(model)
    split = 3 * config.intermediate_size + 4 * config.num_heads * config.head_dim
    if cached:  # keys and values of all layers, and their copy with room for new ones
        split += 4 * config.num_layers * config.num_kv_heads * config.head_dim
    width = 6 * config.hidden_size + split // (1 if mesh is None else mesh.shape["model"])
    return PassMemory(width * itemsize, 3 * 4 * config.vocab_size, 3 * logits_at_once())


def tokens_that_fit(model: Llama, length: int, read: int, *, cached: bool = False) -> int:
    """Tokens of a pass over rows of `length` tokens, with logits of `read` of them: at least one row."""
    memory = pass_memory(model, cached=cached)
    row = memory.bytes(length, read) - memory.fixed
    return max(length, (planned_memory() - memory.fixed) // row * length)


def tokens_worth_it(model: Llama, length: int, *, cached: bool = False) -> int:
    """Tokens of a pass over rows of `length` tokens that keeps the device busy; more gain nothing.

    On a GPU they cost: XLA times its kernels at this size when it compiles. A Llama-2-7B shape runs at 95 % of the matrix
    product's rate with 16,384 (H200, bfloat16). With a cache, as many as there can be: each new token reads all weights.
    """
    if jax.default_backend() == "cpu":
        return max(length, 2**12)
    if cached:
        return max(length, 2**18)
    return max(length, min(max(_BUSY // _token_flop(model), 2**14), 2**18))


def tokens_of_a_compilation(model: Llama) -> int:
    """Tokens that a device reads in about the time in which one more program is compiled."""
    return _COMPILATION["cpu" if jax.default_backend() == "cpu" else "gpu"] // _token_flop(model)


def _token_flop(model: Llama) -> int:
    return 2 * sum(leaf.size for leaf in jax.tree.leaves(model.layers))
