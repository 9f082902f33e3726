"""SEAL, Scaling to Emphasize Attention for Long-context retrieval (Lee et al., ACL 2025, arXiv 2501.15225): learnt scales of
the attention's outputs.

Some heads help to find a fact in a long text, and others hinder. SEAL multiplies what each head puts out, before the output
weights W_o, and learns the multipliers from about 50 generated examples of the task. The model's weights stay unchanged.

    SEAL-H    one number per head, [L, H]
    SEAL-C    one number per channel of each head, [L, H D]

The scales are folded into the rows of W_o (`folded`): (s * o) W_o = o (diag(s) W_o). The folded model has the cost of the
original one, in any server.

What was read: the paper's anonymous conference version (method, settings, tables), and the abstract of arXiv's version 2. Its
settings: 50 generated examples, 1 epoch, AdamW at a constant rate (line retrieval: 1e-2 per head and 2e-2 per channel for 7B
models, 2e-2 per head for 13B; needles: 4e-2 and 5e-2), with the axolotl framework. The size of the minibatches is not given.
The authors' code was not found.

    make = seal(scales)                          # a method of `compare`, under which the scales may be traced
    model = folded(model, scales)                # a model of its own

Where we differ:
- The scales are learnt from the search questions, at all positions, and not from examples that a language model wrote in the
  format of the task. The loss is -log p of the gold answer, teacher-forced, as in the verb search.
- `choices` turns the budget into passes over the search questions: half of them for each kind, less one to measure it. With 16
  there are 7 passes for each. A pass learns from three quarters of the questions, 8 prompts per step, and measures the others,
  which choose the pass whose scales are taken (pass 0: all 1). The original has no held-back questions and takes the last step.
- Minibatches have Adam without weight decay (axolotl's default), at the rates of 7B models for line retrieval.
- As a method, the scales are folded anew in every pass, which needs a copy of the output weights in memory. In 16 bits each
  folded weight is rounded once; scales of 1 change no bit.

Letters: L layers, H heads, D head dim, n = H or H D numbers per layer.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lpes_jax.errors import UserError
from lpes_jax.methods import Choice, Maker, Tuning
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.method import Method, OutputMethod, table_method
from lpes_jax.models.llama.model import Llama, with_scaled_outputs
from lpes_jax.rope import RopeTable, is_traced

_RATES = {"head": 1e-2, "channel": 2e-2}


def seal(scales: Float[np.ndarray, "L n"] | Float[Array, "L n"]) -> Maker:
    """The model with its attention's outputs scaled, per head or per channel.

    Raises:
        UserError: A scale is not finite. From the maker: the scales do not fit the model.
    """
    if not is_traced(scales) and not np.isfinite(scales).all():
        raise UserError("SEAL: every scale must be a finite number")

    def make(config: LlamaConfig, length: int) -> Method:
        return OutputMethod(table_method(config.rope_table(length)).tables, by_channel(jnp.asarray(scales), config))

    return make


def folded(model: Llama, scales: Float[np.ndarray, "L n"] | Float[Array, "L n"]) -> Llama:
    """A copy of the model with the scales in its output weights. Raises UserError if they do not fit the model."""
    return with_scaled_outputs(model, by_channel(jnp.asarray(scales), model.config))


def with_scales(model: Llama, scales: Float[Array, "L n"], length: int) -> tuple[Llama, RopeTable]:
    """The folded model and its own RoPE table."""
    return folded(model, scales), model.config.rope_table(length)


def by_channel(scales: Float[Array, "L n"], config: LlamaConfig) -> Float[Array, "L HD"]:
    """The scale of each channel of the attention's output. Raises UserError if the scales do not fit the model."""
    heads, channels = config.num_heads, config.num_heads * config.head_dim
    if scales.shape not in ((config.num_layers, heads), (config.num_layers, channels)):
        raise UserError(
            f"SEAL: the model has {config.num_layers} layers with {heads} heads of {config.head_dim} channels, so scales have "
            f"{config.num_layers} rows of {heads} or {channels} numbers; got {' x '.join(map(str, scales.shape))}"
        )
    return jnp.repeat(scales, channels // scales.shape[1], axis=1)


def choices(tuning: Tuning) -> list[Choice]:
    """Scales per head, and with a budget of 4 or more also per channel, learnt in as many passes as the budget allows."""
    kinds = list(_RATES) if tuning.budget >= 4 else ["head"]
    passes = tuning.budget // 2 - 1 if len(kinds) > 1 else tuning.budget
    config, found = tuning.model.config, []
    for kind in kinds:
        numbers = config.num_heads * (config.head_dim if kind == "channel" else 1)
        start = jnp.ones((config.num_layers, numbers), jnp.float32)
        scales = tuning.learn("seal", with_scales, start, passes, _RATES[kind])
        found.append(Choice(f"a scale per {kind}, {passes} pass{'es' * (passes > 1)}", seal(np.asarray(scales))))
    return found
