"""The size of a pass that fits the memory, from a model of its activations and the free memory of the device.

The model counts, per token of an individual, the arrays of one layer that are live together: copies of the hidden state, of
queries, keys and values, and of the MLP's intermediate values. It adds float32 logits of the positions that are read, their
softmax, and the attention logits that are held at once. Plans use half of the free memory. If a pass still exceeds the memory,
`out_of_memory` recognises the error and the pass is repeated in smaller ones.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from lpes_jax.mesh import least, mesh_of
from lpes_jax.models.llama.attention import logits_at_once
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.eight_bits import PROJECTIONS
from lpes_jax.models.llama.model import Llama
from lpes_jax.models.llama.packed import Packed

_BUSY = 2**47  # FLOP of a pass that keeps a large GPU busy: measured for a 7B shape, assumed for others
_COMPILATION = {"cpu": 2**38, "gpu": 2**51}  # FLOP that a device computes in the time a program of all layers takes to compile
_CPU_MEMORY = 2**31  # bytes for activations if the device does not report its memory


def out_of_memory(error: Exception) -> bool:
    """Whether this is XLA's out-of-memory error."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def unless_out_of_memory(run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result of `run`, or None if a device of any process ran out of memory; and this process's error, if it has one.

    All processes must call it in the same order.
    """
    done, failed = None, None
    try:
        done = jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        failed = error
    return done if least(int(failed is None)) else None, failed


def planned_memory() -> int:
    """Bytes that a pass may use: the minimum over all processes, which must all call it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return least((stats["bytes_limit"] - stats["bytes_in_use"]) // 2 if "bytes_limit" in stats else _CPU_MEMORY)


class PassMemory(NamedTuple):
    """Bytes of one individual's pass: per token, per token whose logits are read, and fixed."""

    token: int
    read: int
    fixed: int

    def bytes(self, tokens: int, read: int) -> int:
        """Bytes of a pass over `tokens` tokens with logits of `read` of them."""
        return tokens * self.token + read * self.read + self.fixed


def pass_memory(model: Llama, *, cached: bool = False) -> PassMemory:
    """The memory of a pass per device.

    The devices of a model axis share everything except hidden states and logits.

    Args:
        model: Gives sizes, dtype and mesh.
        cached: Whether keys and values are cached.
    """
    mesh, itemsize = mesh_of(model), model.embed[...].dtype.itemsize
    packed = any(isinstance(getattr(model.layers, name), Packed) for name in PROJECTIONS)
    model_axis = 1 if mesh is None else mesh.shape["model"]
    return planned_pass(model.config, itemsize, cached=cached, packed=packed, model_axis=model_axis)


def planned_pass(
    config: LlamaConfig,
    itemsize: int,
    *,
    cached: bool = False,
    packed: bool = False,
    model_axis: int = 1,
    backend: str | None = None,
) -> PassMemory:
    """`pass_memory` of a model that is not loaded.

    Args:
        config: Its sizes.
        itemsize: Bytes of a number of its dtype.
        cached: Whether keys and values are cached.
        packed: Whether a layer's weights are unpacked when it runs.
        model_axis: Devices that share the model.
        backend: cpu or gpu; None means this process's.
    """
    split = 3 * config.intermediate_size + 4 * config.num_heads * config.head_dim
    if cached:  # keys and values of all layers, and their copy with room for new ones
        split += 4 * config.num_layers * config.num_kv_heads * config.head_dim
    width = 6 * config.hidden_size + split // model_axis
    unpacked = itemsize * layer_weights(config) // config.num_layers // model_axis if packed else 0
    return PassMemory(width * itemsize, 3 * 4 * config.vocab_size, 3 * logits_at_once(backend) + unpacked)


def planned_step(
    config: LlamaConfig,
    itemsize: int,
    prompts: int,
    length: int,
    windows: int = 0,
    window: int = 0,
    *,
    packed: bool = False,
    backend: str | None = None,
) -> int:
    """Bytes of a step of gradient descent beside the weights.

    A step keeps each layer's input for all tokens, and recomputes one layer at a time, of which about twice the arrays of a
    forward pass are live. Attention in blocks (on a CPU) keeps the weights of all pairs of tokens; cuDNN's keeps none.

    Args:
        config: The model's sizes.
        itemsize: Bytes of a number of its dtype.
        prompts: Prompts of a step that share no prefix.
        length: Tokens of a prompt with its answer.
        windows: Windows of plain text, whose loss is the KL divergence.
        window: Tokens of a window.
        packed: Whether a layer's weights are unpacked when it runs.
        backend: cpu or gpu; None means this process's.
    """
    memory = planned_pass(config, itemsize, packed=packed, backend=backend)
    kept = config.num_layers * config.hidden_size * itemsize * (prompts * length + windows * window)
    layers, logits = [], []
    for rows, tokens, read in ((prompts, length, 64), (windows, window, min(window, 256))):
        pairs = rows * config.num_heads * tokens**2 if (backend or jax.default_backend()) == "cpu" else 0
        layers.append(2 * rows * tokens * memory.token + 3 * 4 * pairs)
        logits.append(2 * rows * read * memory.read)
    return kept + max(layers) + max(logits) + 2 * memory.fixed


def tokens_that_fit(model: Llama, length: int, read: int, *, cached: bool = False) -> int:
    """Tokens of a pass that fits the memory, for rows of `length` tokens with logits of `read` of them; at least one row."""
    memory = pass_memory(model, cached=cached)
    row = memory.bytes(length, read) - memory.fixed
    return max(length, (planned_memory() - memory.fixed) // row * length)


def tokens_worth_it(model: Llama, length: int, *, cached: bool = False) -> int:
    """Tokens of a pass that keeps the device busy, for rows of `length` tokens; larger passes gain nothing.

    On a GPU, larger passes also compile longer: XLA times its kernels at this size. A Llama-2-7B shape reaches 95 % of the
    matrix product's rate with 16,384 tokens (H200, bfloat16). With a cache, more tokens always help, because each step reads
    all weights.
    """
    if jax.default_backend() == "cpu":
        return max(length, 2**12)
    if cached:
        return max(length, 2**18)
    return max(length, min(max(_BUSY // _token_flop(model), 2**14), 2**18))


def tokens_of_a_compilation(model: Llama) -> int:
    """Tokens that a device processes in about the time that compiling one more program takes."""
    return _COMPILATION["cpu" if jax.default_backend() == "cpu" else "gpu"] // _token_flop(model)


def _token_flop(model: Llama) -> int:
    return 2 * layer_weights(model.config)


def layer_weights(config: LlamaConfig) -> int:
    """Weights of all matrices of the layers."""
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)
