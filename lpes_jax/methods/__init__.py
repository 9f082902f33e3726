"""LPES and its rivals. A method is a function of its settings that returns a `Maker`; this fits it to a model and a length.

    method                        description                                 passes per token   source
    tables.position_interpolation one factor for all layers (also `uniform`)  1                Chen et al., arXiv 2306.15595
    tables.mean_of                the same, with the mean of found factors    1                LPES paper, section 4
    tables.dynamic_ntk            a base that grows beyond the window         1                transformers, RoPE type `dynamic`
    tables.ntk_by_base            a larger base at every length               1                "NTK-aware" scaling
    tables.yarn                   a factor per frequency, and a temperature   1                Peng et al., arXiv 2309.00071
    tables.lpes                   a factor per layer                          1                the LPES paper, Eq. 2 to 6
    attention_buckets             one pass per base, outputs mixed            one per base     Chen et al., arXiv 2312.04455
    ms_poe                        a factor per head                           1                Zhang et al., arXiv 2403.04797
    moice                         bases mixed in each head by a router        1                Lin et al., arXiv 2406.19598
    self_extend                   far keys at coarser positions               1                Jin et al., arXiv 2401.01325
    hidden_channel                one channel of the hidden states scaled     1                Yu et al., arXiv 2406.02536
    zero_tuning                   the first token's weight scaled             1, attention: 2  Han et al., arXiv 2505.11739
    seal                          learnt scales of the attention's outputs    1                Lee et al., arXiv 2501.15225
    learnt_tables                 factors, gains or both, learnt by compare   1                this project, on equal terms

Not included: attention calibration (Hsieh et al., arXiv 2406.16008). It rescales the attention to each document, after one
extra pass per document with an uninformative document in its place. A maker does not know where documents are. We found no code
of the paper that defines the uninformative text, or the heads and layers over which the subtracted averages are taken.

Not included either: PINE (Wang et al., arXiv 2407.01100), which makes the order of documents irrelevant. A maker does not know
where documents are. In the released code (wzq016/PINE) every document attends to all others, also to later ones, so its states
depend on the texts after it: no prefix can be shared, and the attention is not causal. For each document, and for each token
after the documents, each head sorts the documents by their mean attention without positions. Rounding decides between nearly
equal means, and it depends on the order of the documents. So in floating point the promised invariance is not exact.

A maker's result is scored and generates like the plain model: `batch_scores`, `token_nll` and `generate_ids` accept it. The
function raises UserError for settings that no model could use, the maker for settings that the given model cannot use.

Beside its function, a method has `choices(tuning)`: the settings that `compare` tries (NAME_choices in tables.py, which has
several methods). To add a method, add a file here and a line in `lpes_jax.compare.METHODS`.
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
from lpes_jax.rope import RopeTable

Parameters = Any  # a pytree of float arrays
Apply = Callable[[Llama, Parameters, int], tuple[Llama, RopeTable]]
"""(model, parameters, length) -> the model and the RoPE table with the parameters. `length`: tokens of the longest text."""
LearnParameters = Callable[[str, Apply, Parameters, int, float], Parameters]
Maker = Callable[[LlamaConfig, int], Method]
"""(config, length) -> method. `length`: tokens of the longest text of the call, prompt and answer together."""


@dataclass(frozen=True)
class Choice:
    """A setting of a method, and its maker (None: the model unchanged)."""

    setting: str
    maker: Maker | None
    then: tuple["Choice", ...] = ()
    """Settings to try next if this one is the best."""


@dataclass(frozen=True)
class Tuning:
    """What a method's `choices` may use. `choices` raises UserError if something that the method needs is missing."""

    model: Llama
    tokenizer: Any
    budget: int
    """Settings that may be tried."""
    seed: int
    factors: LayerFactors | None
    """The factors that a search found (lpes, pi)."""
    factors_from: str
    """The user's name for the factors."""
    router: Path | None
    """moice: a router that is already trained."""
    text: Callable[[int], Int[np.ndarray, "W T"]]
    """moice: windows of the given number of tokens, to train a router on."""
    text_from: str
    router_steps: int
    router_batch: int
    channel_strings: int
    """hidden_channel: random strings from which positional channels are found."""
    score: Callable[[Maker], tuple[float, float] | None]
    """zero_tuning: accuracy and mean log-likelihood (nats) on the search questions, or None if the task has no short answers.
    A call counts as one of the `budget` settings."""
    learn: LearnParameters
    """seal, learnt_tables: (name, apply, start, passes, learning rate) -> parameters, learnt by gradient descent on the search
    questions. A pass processes each question once, and counts as one setting."""
    once: Callable[[str, Callable[[], list[np.ndarray]]], list[np.ndarray]] = lambda name, find: find()
    """(a method's name, a function that finds arrays) -> the arrays. An interrupted comparison finds them once."""
