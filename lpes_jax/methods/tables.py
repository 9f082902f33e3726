"""The methods that are a single RoPE table: they cost as much as the plain model.

Each starts from the model's own RoPE, including its theta. A table is made once per call, for the longest text (see
`lpes_jax.rope`), so all keys of a call are rotated by the same table. If the model's RoPE already has a type, interpolation and
LPES divide the frequencies of that type. The other methods rebuild frequencies from theta, which would undo the type that the
model was trained with; they refuse such models.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.mark import refuse_marked
from lpes_jax.methods import Choice, Maker, Tuning
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.method import Method, table_method
from lpes_jax.rope import RopeParameters

BEYOND = ("linear", "dynamic")


def position_interpolation(factor: float) -> Maker:
    """Divide every position of every layer by `factor`: transformers' `linear`, bit for bit.

    The paper (arXiv 2306.15595) fine-tunes a model with it for longer texts. Here, as in the LPES paper, it is used without
    training, also inside the window.
    """
    _check_factor("position interpolation", factor)

    def make(config: LlamaConfig, length: int) -> Method:
        return table_method(config.rope_table(length, jnp.full(config.num_layers, factor, jnp.float32)))

    return make


uniform = position_interpolation  # the same table, with a factor tuned on the examples that LPES is searched on


def mean_of(factors: LayerFactors) -> Maker:
    """Position interpolation by the mean of found factors: the LPES paper's PI baseline."""
    interpolated = position_interpolation(factors.mean)

    def make(config: LlamaConfig, length: int) -> Method:
        _fitted("mean_of", factors, config)
        return interpolated(config, length)

    return make


def dynamic_ntk(factor: float) -> Maker:
    """theta' = theta (factor n/W - (factor - 1))^(R/(R-2)) for texts of n > W tokens, W the window; theta up to W.

    This is transformers' `dynamic`, except for n. There n follows the text as it is generated, while cached keys keep their old
    base. Here n is the longest text of the call, and all keys have one base. Inside the window the factor has no effect.
    """
    _check_factor("dynamic NTK", factor)

    def make(config: LlamaConfig, length: int) -> Method:
        return table_method(_with_rope("dynamic NTK", config, rope_type="dynamic", factor=factor).rope_table(length))

    return make


def ntk_by_base(factor: float) -> Maker:
    """theta' = theta factor^(R/(R-2)) at every length: the lowest frequency is divided by `factor`, the highest kept.

    "NTK-aware" scaling as first proposed (2023, for Llama without fine-tuning), before the dynamic version.
    """
    _check_factor("NTK by base", factor)

    def make(config: LlamaConfig, length: int) -> Method:
        _check_default("NTK by base", config)
        theta = config.rope.rope_theta * factor ** (config.rotary_dim / (config.rotary_dim - 2))
        return table_method(_with_rope("NTK by base", config, rope_theta=theta).rope_table(length))

    return make


def yarn(
    factor: float,
    original_max_position_embeddings: int | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Maker:
    """Keep frequencies that turn often in the window, divide slow ones by `factor`, with a ramp in between; at every length.

    cos and sin are multiplied by 0.1 ln(factor) + 1 (1 for factors up to 1). The window is the model's own unless
    `original_max_position_embeddings` gives one, in tokens. The paper (arXiv 2309.00071) fine-tunes; here there is no training.
    This is transformers' `yarn`.
    """
    _check_factor("YaRN", factor)
    settings = {"factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow}
    if original_max_position_embeddings is not None:
        settings["original_max_position_embeddings"] = original_max_position_embeddings
    if not 0 < beta_slow < beta_fast < math.inf:
        raise UserError(f"YaRN: beta_fast must be above beta_slow, and beta_slow above 0; got {beta_fast} and {beta_slow}")

    def make(config: LlamaConfig, length: int) -> Method:
        return table_method(_with_rope("YaRN", config, rope_type="yarn", **settings).rope_table(length))

    return make


def lpes(factors: LayerFactors, beyond: str | None = None, factor: float | None = None) -> Maker:
    """Divide the positions of layer l by its own factor (paper, Eq. 2), at every length, and apply the factors' gains.

    Texts longer than the model's window W may be stretched as well. `beyond="linear"` divides all positions by `factor` again.
    `"dynamic"` uses the base of `dynamic_ntk(factor)` and divides the result by the layer's factor. (The authors' code uses
    each layer's factor as dynamic NTK's factor, which has no effect up to W.)
    """
    if beyond is not None and beyond not in BEYOND:
        raise UserError(f"LPES: beyond={beyond!r:.60} is not one of {', '.join(BEYOND)}")
    if (beyond is None) != (factor is None):
        raise UserError("LPES: beyond and factor go together; give both or neither")
    if factor is not None:
        _check_factor("LPES beyond the window", factor)

    def make(config: LlamaConfig, length: int) -> Method:
        found = _fitted("LPES", factors, config)
        if beyond == "dynamic":
            config = _with_rope("LPES with dynamic NTK", config, rope_type="dynamic", factor=factor)
        elif beyond == "linear" and length > config.max_position_embeddings:
            found = replace(found, factors=np.asarray(found.factors, np.float32) * np.float32(factor))
        return table_method(config.rope_table(length, found))

    return make


def uniform_choices(tuning: Tuning) -> list[Choice]:
    """One factor for all layers."""
    return _by_factor(position_interpolation, 0.5, 2.0, tuning)


def pi_choices(tuning: Tuning) -> list[Choice]:
    """The mean of the factors that a search found."""
    return [Choice(tuning.factors_from, mean_of(_found("pi", tuning)))]


def dynamic_ntk_choices(tuning: Tuning) -> list[Choice]:
    """A single factor: inside the window it has no effect."""
    return [Choice("factor 2", dynamic_ntk(2.0))]


def ntk_by_base_choices(tuning: Tuning) -> list[Choice]:
    """Factors from 1."""
    return _by_factor(ntk_by_base, 1.0, 4.0, tuning)


def yarn_choices(tuning: Tuning) -> list[Choice]:
    """Factors from 1."""
    return _by_factor(yarn, 1.0, 4.0, tuning)


def lpes_choices(tuning: Tuning) -> list[Choice]:
    """The factors that a search found."""
    return [Choice(tuning.factors_from, lpes(_found("lpes", tuning)))]


def _by_factor(make: Callable[[float], Maker], low: float, high: float, tuning: Tuning) -> list[Choice]:
    factors = np.linspace(low, high, tuning.budget).round(4).tolist()
    return [Choice(f"factor {factor:g}", make(factor)) for factor in factors]


def _found(name: str, tuning: Tuning) -> LayerFactors:
    if tuning.factors is None:
        raise UserError(f"--methods {name} needs --factors, the factors.json of a search")
    return tuning.factors


def _with_rope(name: str, config: LlamaConfig, **keys: Any) -> LlamaConfig:
    """The config with other `rope_parameters`, read like those of a checkpoint."""
    _check_default(name, config)
    given = {"max_position_embeddings": config.max_position_embeddings, "rope_parameters": config.rope.to_hf() | keys}
    return replace(config, rope=RopeParameters.from_hf(given, name))


def _check_default(name: str, config: LlamaConfig) -> None:
    if (kind := config.rope.rope_type) != "default":
        raise UserError(
            f"{name}: the model's RoPE already has the type {kind!r}, which this would undo; interpolation divides any RoPE"
        )
    if config.rotary_dim < 4:
        raise UserError(f"{name}: needs at least 4 rotated elements per head, the model has {config.rotary_dim}")


def _check_factor(name: str, factor: float) -> None:
    if not 0 < factor < math.inf:
        raise UserError(f"{name}: the factor must be a number above 0, got {factor}")


def _fitted(name: str, factors: LayerFactors, config: LlamaConfig) -> LayerFactors:
    if not factors.changes_nothing:
        refuse_marked(config.mark, name)
    return factors.for_model(config.num_layers, config.num_kv_heads, config.rotary_dim, name)
