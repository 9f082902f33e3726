"""Gradient descent on the search questions, for methods with learnt numbers (`lpes_jax.methods.Tuning.learn`).

The last quarter of the questions is held back, and measured at the start and after each pass. A pass is one epoch over the
others, so with its measurement it processes each question once. The result has the least loss on the held-back questions.
"""

import math
from collections.abc import Sequence
from typing import Any

from lpes_jax.errors import UserError
from lpes_jax.finite import not_finite
from lpes_jax.methods import Apply, Parameters
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama
from lpes_jax.search.gradient import Look, LossNotFinite, State, descend
from lpes_jax.search.minibatches import Data, Share, by_length, pack, prompts_per_group, shared_groups
from lpes_jax.settings.search import GradientSettings, TextSettings
from lpes_jax.tasks.prompts import EncodedPrompt, Prompt, encode

_HELD_BACK = 4  # one in this many questions is held back
_MINIBATCH = 8  # prompts per step


def learn(
    model: Llama,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    seed: int,
    name: str,
    apply: Apply,
    start: Parameters,
    passes: int,
    learning_rate: float,
) -> Parameters:
    """The parameters learnt from -log p of the prompts' answers, by Adam at a constant rate.

    Args:
        model: The model, whose own weights stay unchanged.
        tokenizer: Its tokenizer.
        prompts: The search questions at all positions; empty if the task has no short answers.
        seed: Of the minibatches.
        name: The method's name, for errors.
        apply: Gives the model and the RoPE table with parameters; differentiable in them.
        start: The initial parameters.
        passes: Passes over the questions.
        learning_rate: Adam's.

    Raises:
        UserError: There are no answers, fewer than two questions, or the loss is not finite.
    """
    if not prompts:
        raise UserError(f"--methods {name} learns from short answers, which this task does not have; leave it out")
    questions = list(dict.fromkeys(prompt.example for prompt in prompts))
    if len(questions) < 2:
        raise UserError(f"--methods {name} learns from some search questions and measures the others; give --limit 2 or more")
    kept = set(questions[-math.ceil(len(questions) / _HELD_BACK) :])
    encoded = encode(prompts, tokenizer, model.config.max_position_embeddings)
    longest = max(len(prompt.ids) + max(map(len, prompt.answers)) for prompt in encoded)
    parts: list[Data] = []
    for held_back, most in ((False, prompts_per_group(_MINIBATCH)), (True, _MINIBATCH)):
        chosen = [index for index, prompt in enumerate(prompts) if (prompt.example in kept) == held_back]
        lengths = [prompts[index].num_items for index in chosen]
        parts.append(_data([encoded[index] for index in chosen], lengths, model.config, most))
    train, held_back = parts
    steps = max(1, round(sum(int(examples.is_prompt.sum()) for examples in train.tasks) / _MINIBATCH))
    settings = GradientSettings(
        steps=steps * passes,
        look_every=steps,
        minibatch_size=_MINIBATCH,
        learning_rate=learning_rate,
        schedule="constant",
    )

    def on_look(look: Look, state: State) -> None:
        if look.step == 0 and not math.isfinite(look.loss):
            raise not_finite(model, [prompt.ids + prompt.answers[0] for prompt in encoded], name=name, method=True)

    try:
        best = descend(
            model,
            train,
            held_back,
            start,
            lambda model, parameters: apply(model, parameters, longest),
            settings,
            TextSettings(),
            seed=seed,
            on_look=on_look,
        )
    except LossNotFinite as error:
        raise UserError(
            f"--methods {name}: the loss on the search questions is not finite; leave it out, or try --dtype float32"
        ) from error
    return best.parameters


def _data(prompts: Sequence[EncodedPrompt], lengths: Sequence[int], config: LlamaConfig, most: int) -> Data:
    """The prompts, at most `most` per group, in few shapes by their number of items."""
    packed, shares = [], []
    for indices in by_length(lengths):
        chosen = [prompts[index] for index in indices]
        packed.append(pack(chosen, [1.0] * len(chosen), shared_groups(chosen, config, most)))
        shares.append(Share(0, len(chosen) / len(prompts), 1.0))
    return Data(packed, None, tuple(shares))
