"""MoICE (Lin et al., arXiv 2406.19598; code in p1nksnow/MoICE): several RoPE bases in every head, mixed by a router.

The original works as follows in every layer. Queries and keys are rotated with each of seven bases, and attention runs for
each. The router, one per layer and shared by its heads, reads a head's query after rotation with the first base:

    weights = softmax(W2 (silu(W1 q) x W3 q)),  W1, W3: D -> 7,  W2: 7 -> 7, no bias

The top k weights are kept and renormalised (7 of 7 in its training script), and the attention outputs are summed with them.
Only the router is trained: with the language-model loss on all tokens of OpenHermes conversations, 7 steps of 128 of them,
AdamW at a constant 1e-4 without weight decay, gradients clipped to norm 1, from the random initialisation of a torch linear
layer.

    windows = text_windows(Path("conversations.txt"), model, tokenizer, seed=0, length=1024, most=896)
    router, losses = train_router(model, windows)
    router.save(Path("router.safetensors"))
    make = moice(Router.load(Path("router.safetensors")))

Where we differ:
- A base of 10,000 means the model's own theta, and the others scale with it: the original's are for Llama 2, whose theta is
  10,000. The model's RoPE type (llama3, yarn) is kept, with another theta.
- The router's weights and sums are float32 for every model; the original's are bfloat16, in which a step of 1e-4 may be lost.
- The original adds 0.3 x the balance loss of Switch Transformers. If all bases are chosen, this is a constant without gradient.
  We omit it, also for fewer bases, where it would matter.
- The original's batches are conversations of any length up to 4,608 tokens, with BOS written three times. Ours are windows of
  one length, reused in a new order if there are fewer than the steps need.
- Bases run one after the other, so memory is that of one; the original folds them into the batch. Both keep unrotated keys and
  rotate the whole cache with every base for each new token.

Letters: n bases, W windows, T tokens, B batch, S keys, L layers, H heads, K key-value heads, D head dim.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lpes_jax.errors import UserError
from lpes_jax.json_files import parse_json
from lpes_jax.methods import Choice, Maker, Tuning
from lpes_jax.models.llama.attention import cached_attention, causal_attention
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.method import Layer, Method, attention_method
from lpes_jax.models.llama.model import Llama, check_ids
from lpes_jax.rope import cos_sin, rotate
from lpes_jax.store.files import replacing
from lpes_jax.text_nll import check_text, token_nll

BASES = (10_000.0, 17_500.0, 18_000.0, 19_000.0, 20_000.0, 22_500.0, 25_000.0)
_LEAVES = ("w1", "w2", "w3")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Router:
    """The routers of all layers, with weights stored as [in, out], and the bases that they choose from."""

    w1: Float[Array, "*layers D n"]
    w2: Float[Array, "*layers n n"]
    w3: Float[Array, "*layers D n"]
    bases: tuple[float, ...] = field(metadata={"static": True})

    @classmethod
    def init(cls, key: jax.Array, config: LlamaConfig, bases: Sequence[float] = BASES) -> "Router":
        """Uniform within 1 / sqrt(inputs), like torch's linear layers. Raises UserError for bases that are not positive."""
        if not bases or not all(0 < base < math.inf for base in bases):
            raise UserError(f"MoICE: bases must be one or more positive numbers, got {list(bases)!r:.60}")
        count, inputs = len(bases), (config.head_dim, len(bases), config.head_dim)
        weights = [
            jax.random.uniform(key, (config.num_layers, size, count), jnp.float32, -(size**-0.5), size**-0.5)
            for key, size in zip(jax.random.split(key, 3), inputs, strict=True)
        ]
        return cls(*weights, bases=tuple(map(float, bases)))

    def save(self, path: Path) -> None:
        """Write one safetensors file, with the bases in its metadata, atomically."""
        tensors = {name: np.asarray(getattr(self, name)) for name in _LEAVES}
        with replacing(path) as part:
            save_file(tensors, part, metadata={"bases": json.dumps(self.bases)})

    @classmethod
    def load(cls, path: Path) -> "Router":
        """Read what `save` wrote. Raises UserError for anything else."""
        try:
            with safe_open(path, framework="numpy") as file:
                weights = {name: jnp.asarray(file.get_tensor(name), jnp.float32) for name in _LEAVES}
                bases = tuple(map(float, parse_json((file.metadata() or {})["bases"], "bases", list)))
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; train a router first") from None
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, UserError) as error:
            raise UserError(f"{path}: not a router of MoICE ({error!s:.80}); train it again") from error
        layers, dim, count = (*weights["w1"].shape, 0, 0, 0)[:3]
        wanted = {"w1": (layers, dim, count), "w2": (layers, count, count), "w3": (layers, dim, count)}
        if any(weights[name].shape != wanted[name] for name in _LEAVES) or count != len(bases):
            raise UserError(f"{path}: not a router of MoICE (its weights and bases do not fit each other); train it again")
        return cls(**weights, bases=bases)


class Experts(NamedTuple):
    """A layer's parameters: the frequencies of each base, and its router."""

    inv_freq: Float[Array, "*layers n G half"]
    router: Router


def moice(router: Router, top_k: int | None = None) -> Maker:
    """MoICE with a trained router; each token mixes its `top_k` likeliest bases (None: all).

    Raises:
        UserError: `top_k` is not 1 to n. From the maker: the router does not belong to the model.
    """
    count = len(router.bases)
    if top_k is not None and not 1 <= top_k <= count:
        raise UserError(f"MoICE: top_k must be 1 to {count}, the number of bases, got {top_k}")

    def make(config: LlamaConfig, length: int) -> Method:
        if router.w1.shape[:2] != (config.num_layers, config.head_dim):
            layers, dim, _ = router.w1.shape
            raise UserError(
                f"MoICE: the router has {layers} layers with heads of {dim}, the model has {config.num_layers} with heads of "
                f"{config.head_dim}; train a router for this model"
            )
        thetas = [config.rope.rope_theta * base / 10_000 for base in router.bases]
        if min(thetas) <= 1:
            raise UserError(f"MoICE: a base of {min(router.bases)} gives a theta of {min(thetas)}; it must be above 1")
        ropes = [replace(config.rope, rope_theta=theta) for theta in thetas]
        tables = [replace(config, rope=rope).rope_table(length).inv_freq for rope in ropes]
        experts = Experts(jnp.stack(tables, axis=1), router)
        return attention_method("MoICE", MixedBases(count if top_k is None else top_k), config, length, experts)

    return make


def choices(tuning: Tuning) -> list[Choice]:
    """The given router, or one that is trained here."""
    if tuning.router is not None:
        return [Choice(str(tuning.router), moice(Router.load(tuning.router)))]

    def weights() -> list[np.ndarray]:
        windows = tuning.text(min(512, tuning.model.config.max_position_embeddings))
        router, _ = train_router(tuning.model, windows, steps=tuning.router_steps, batch=tuning.router_batch, seed=tuning.seed)
        return [np.asarray(getattr(router, name)) for name in _LEAVES]

    router = Router(*map(jnp.asarray, tuning.once("moice", weights)), bases=BASES)
    return [Choice(f"router trained on {tuning.text_from}", moice(router))]


@dataclass(frozen=True)
class MixedBases:
    """Attention with every base, with outputs mixed by the router. It has no state."""

    top_k: int

    def prefill(
        self,
        layer: Layer,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        lengths: Int[Array, "B"],
    ) -> tuple[Float[Array, "B T H D"], None]:
        """See `Attention`."""
        positions = jnp.arange(q.shape[1])
        return self._mixed(layer, q, k, positions, positions, partial(causal_attention, v=v)), None

    def decode(
        self,
        layer: Layer,
        state: None,
        q: Float[Array, "B 1 H D"],
        k: Float[Array, "B S K D"],
        v: Float[Array, "B S K D"],
        positions: Int[Array, "B"],
    ) -> Float[Array, "B 1 H D"]:
        """See `Attention`."""
        attend = partial(cached_attention, v=v, lengths=positions + 1)
        return self._mixed(layer, q, k, positions[:, None], jnp.arange(k.shape[1]), attend)

    def _mixed(
        self,
        layer: Layer,
        q: Array,
        k: Array,
        q_positions: Array,
        k_positions: Array,
        attend: Callable[..., Float[Array, "B T H D"]],
    ) -> Float[Array, "B T H D"]:
        experts: Experts = layer.parameters
        wide = np.promote_types(q.dtype, jnp.float32)

        def rotated(x: Array, inv_freq: Float[Array, "G half"], positions: Array) -> Array:
            return rotate(x, *cos_sin(inv_freq, layer.attention_scaling, positions))

        @partial(jax.checkpoint, prevent_cse=False)  # so that a gradient holds the attention of one base at a time
        def add(total: Array, expert: tuple[Array, Array]) -> tuple[Array, None]:
            inv_freq, weight = expert
            out = attend(rotated(q, inv_freq, q_positions), rotated(k, inv_freq, k_positions))
            return total + weight[..., None] * out.astype(wide), None

        weights = routing_weights(experts.router, rotated(q, experts.inv_freq[0], q_positions), self.top_k).astype(wide)
        total = jnp.zeros(q.shape, wide)
        total, _ = jax.lax.scan(add, total, (experts.inv_freq, jnp.moveaxis(weights, -1, 0)))
        return total.astype(q.dtype)


def routing_weights(router: Router, q: Float[Array, "B T H D"], top_k: int) -> Float[Array, "B T H n"]:
    """The share of each base in the output of each head of each token; `router` is one layer's, `q` is rotated."""
    product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    q = q.astype(router.w1.dtype)
    weights = jax.nn.softmax(product(jax.nn.silu(product(q, router.w1)) * product(q, router.w3), router.w2), axis=-1)
    if top_k < weights.shape[-1]:
        _, chosen = jax.lax.top_k(weights, top_k)
        weights = weights * jax.nn.one_hot(chosen, weights.shape[-1], dtype=weights.dtype).sum(axis=-2)
    return weights / weights.sum(axis=-1, keepdims=True)


def train_router(
    model: Llama,
    windows: Int[np.ndarray, "W T"],
    *,
    bases: Sequence[float] = BASES,
    top_k: int | None = None,
    steps: int = 7,
    batch: int = 128,
    microbatch: int = 4,
    learning_rate: float = 1e-4,
    seed: int = 0,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[Router, list[float]]:
    """Train a router. The model's own weights stay unchanged.

    Args:
        model: The model.
        windows: Token ids of text. Batches are drawn without replacement until all windows have been used.
        bases: The bases to mix.
        top_k: Bases per token; None means all.
        steps: Steps of AdamW.
        batch: Windows per step.
        microbatch: Windows in memory at once; it changes no result.
        learning_rate: Of AdamW.
        seed: Seed of the order and of the start.
        on_step: Called with each step's number, from 1, and its loss.

    Returns:
        The router, and the loss before each step in nats per token.

    Raises:
        UserError: A count is out of range, a window has ids outside the vocabulary, or the loss is not finite.
    """
    if min(steps, batch, microbatch) < 1 or not learning_rate > 0:
        raise UserError("MoICE: steps, batch and microbatch must be at least 1, and the learning rate above 0")
    if windows.shape[0] < 1 or windows.shape[1] < 2:
        raise UserError(
            f"MoICE: a router is trained on windows of 2 tokens or more, got {windows.shape[0]} of {windows.shape[1]}"
        )
    check_ids(model, windows)
    rng = np.random.default_rng(seed)
    epochs = -(-steps * batch // len(windows))
    order = np.concatenate([rng.permutation(len(windows)) for _ in range(epochs)])[: steps * batch]
    start = Router.init(jax.random.key(seed), model.config, bases)
    weights = start.w1, start.w2, start.w3
    moments, losses = _optimizer(learning_rate).init(weights), []
    for step, indices in enumerate(order.reshape(steps, -1, math.gcd(batch, microbatch)), start=1):
        tokens = jnp.asarray(windows[indices], jnp.int32)
        weights, moments, loss = _step(model, weights, moments, tokens, start.bases, top_k, learning_rate)
        losses.append(float(loss))
        if not math.isfinite(losses[-1]):
            check_text(model, windows)
            raise UserError(f"MoICE: the router's loss is not finite in step {step}; lower the learning rate")
        on_step(step, losses[-1])
    return Router(*weights, bases=start.bases), losses


def _optimizer(learning_rate: float) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.0))


@partial(jax.jit, static_argnames=("bases", "top_k", "learning_rate"))
def _step(
    model: Llama,
    weights: tuple[Array, Array, Array],
    moments: Any,
    windows: Int[Array, "parts m T"],
    bases: tuple[float, ...],
    top_k: int | None,
    learning_rate: float,
) -> tuple[tuple[Array, Array, Array], Any, Float[Array, ""]]:
    def loss(weights: tuple[Array, Array, Array], tokens: Int[Array, "m T"]) -> Float[Array, ""]:
        method = moice(Router(*weights, bases=bases), top_k)(model.config, tokens.shape[1])
        return token_nll(model, tokens, method, remat=True)[:, 1:].mean()

    def add(total: Any, tokens: Int[Array, "m T"]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(weights, tokens)), None

    total, _ = jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)), windows)
    mean, gradient = jax.tree.map(lambda value: value / len(windows), total)
    updates, moments = _optimizer(learning_rate).update(gradient, moments, weights)
    return jax.tree.map(jnp.add, weights, updates), moments, mean
