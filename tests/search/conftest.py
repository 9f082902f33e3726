"""A tiny model and a tokenizer that whole searches run on."""

import jax.numpy as jnp
import pytest
from byte_tokenizer import byte_tokenizer
from flax import nnx
from transformers import PreTrainedTokenizerFast

from lpes_jax.models.llama import Llama


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, so that ids stay below the tiny model's vocabulary of 300."""
    return byte_tokenizer()


@pytest.fixture(scope="module")
def guesser(tiny_model: Llama, tokenizer: PreTrainedTokenizerFast) -> Llama:
    """The tiny model, saying nearly always some hexadecimal digit: right by chance, so that accuracies differ."""
    digits = jnp.array([tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789abcdef"])
    guesser = nnx.clone(tiny_model)
    head = guesser.head[...]
    guesser.head = nnx.Param(jnp.zeros_like(head).at[:, digits].set(0.5 * head[:, digits]))
    return guesser
