"""MoICE (Lin et al., 2024): every head attends with several RoPE bases, and a router mixes the outputs, token by token.

What the original (p1nksnow/MoICE) does, in every layer: queries and keys are rotated with each of seven bases, and attention runs
for each. The router, one per layer and shared by its heads, sees a head's query after rotation with the first base:

    weights = softmax(W2 (silu(W1 q) x W3 q)),  W1, W3: D -> 7,  W2: 7 -> 7, no bias

of which the top k are kept and renormalised (7 of 7 in its training script). The attention outputs are summed with them. The
router alone is trained: the loss of a language model on all tokens of OpenHermes conversations, 7 steps of 128 of them, AdamW
at a constant 1e-4 without weight decay, gradients clipped to norm 1, from the random start of a torch linear layer.

    windows = text_windows(Path("conversations.txt"), model, tokenizer, seed=0, length=1024, most=896)
    router, losses = train_router(model, windows)
    router.save(Path("router.safetensors"))
    make = moice(Router.load(Path("router.safetensors")))

Where we differ:
- Bases are multiples of the model's own theta; for theta = 10,000 they are the original's. Other kinds of RoPE (llama3, yarn)
  change each base's frequencies as they change the model's.
- The router's weights and its sums are float32 for every model; the original's are bfloat16, where a step of 1e-4 may round away.
- The original adds 0.3 x the balance loss of Switch Transformers. With all bases chosen that is a constant without gradient, so it
  is left out; with fewer it would matter, and is left out too.
- Its batches are conversations of any length up to 4,608 tokens, with BOS written three times; ours are windows of one length,
  used again in a new order where there are fewer than the steps need.
- Bases run one after the other, so memory is that of one; the original folds them into the batch. Both keep unrotated keys and
  rotate the whole cache with every base for each new token.

Letters: n bases, W windows, T tokens, B batch, S keys, L layers, H heads, K key-value heads, D head dim.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from lpes_jax.methods import Maker
from lpes_jax.models.llama.attention import cached_attention, causal_attention
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.method import Layer, Method, of_attention
from lpes_jax.models.llama.model import Llama
from lpes_jax.rope import cos_sin, rotate
from lpes_jax.scoring import token_nll

BASES = (1.0, 1.75, 1.8, 1.9, 2.0, 2.25, 2.5)  # times theta: 10,000 to 25,000 for Llama 2
_LEAVES = ("w1", "w2", "w3")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Router:
    """The routers of all layers, stored as [in, out], and the bases that they choose from, in multiples of theta."""

    w1: Float[Array, "*layers D n"]
    w2: Float[Array, "*layers n n"]
    w3: Float[Array, "*layers D n"]
    bases: tuple[float, ...] = jax.tree_util.static_field() if False else BASES

    @classmethod
    def init(cls, key: jax.Array, config: LlamaConfig, bases: Sequence[float] = BASES) -> "Router":
        raise NotImplementedError
