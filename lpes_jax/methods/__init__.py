"""LPES and its rivals. A method is a function of its own settings; it returns a `Maker`, which fits it to a model and a length.

    method                        what                                        passes a token   source
    tables.position_interpolation one factor for all layers (also `uniform`)  1                Chen et al., arXiv 2306.15595
    tables.mean_of                that, the mean of found factors             1                LPES paper, section 4
    tables.dynamic_ntk            a base that grows beyond the window         1                transformers, RoPE type `dynamic`
    tables.ntk_by_base            a larger base at every length               1                "NTK-aware" scaling
    tables.yarn                   a factor by frequency, and a temperature    1                Peng et al., arXiv 2309.00071
    tables.lpes                   a factor for each layer                     1                the LPES paper, Eq. 2 to 6
    attention_buckets             a pass for each base, outputs mixed         one a base       Chen et al., arXiv 2312.04455
    ms_poe                        a factor for each head                      1                Zhang et al., arXiv 2403.04797
    moice                         bases mixed in each head by a router        1                Lin et al., arXiv 2406.19598
    self_extend                   far keys at coarser positions               1                Jin et al., arXiv 2401.01325
    hidden_channel                a channel of the hidden states scaled       1                Yu et al., arXiv 2406.02536

Left out: attention calibration (Hsieh et al., arXiv 2406.16008). It rescales the attention to each document, after one more
pass for every document with an uninformative one in its place. A maker is not told where documents stand, and no code of the
paper was found that says which text that is, and of which heads and layers the averages are that it subtracts.

What a maker gives, scores and generates as the plain model does: `batch_scores`, `token_nll` and `generate_ids` take it.
Settings that no model could use raise UserError in the function, those that the given model can't use in the maker.

Beside its function a method has `choices(tuning)`: the settings of it that `compare` tries (in tables.py NAME_choices, as there
are several). A new method is a file here, and a line in `lpes_jax.compare.METHODS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.method import Method
from lpes_jax.models.llama.model import Llama

Maker = Callable[[LlamaConfig, int], Method]
"""(config, length) -> method; `length` is that of the longest text of the call in tokens, prompt and answer together."""


@dataclass(frozen=True)
class Choice:
    """A setting of a method, and the method with it; no maker: the model as it is."""

    setting: str
    maker: Maker | None
    then: tuple["Choice", ...] = ()
    """Settings to try next if this one is the best so far."""


@dataclass(frozen=True)
class Tuning:
    """What a method's `choices` go by. `choices` raises UserError where something that the method needs is missing."""

    model: Llama
    tokenizer: Any
    budget: int
    """Settings that may be tried."""
    seed: int
    factors: LayerFactors | None
    """Those that a search found (lpes, pi)."""
    factors_from: str
    """What the user calls them."""
    router: Path | None
    """moice: a router that was trained before."""
    text: Callable[[int], Int[np.ndarray, "W T"]]
    """moice: windows of so many tokens, to train a router on."""
    text_from: str
    router_steps: int
    router_batch: int
    channel_strings: int
    """hidden_channel: random strings that positional channels are looked for on."""
