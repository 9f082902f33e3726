"""A tiny model and a tokenizer that whole searches run on."""

import jax.numpy as jnp
import pytest
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lpes_jax.models.llama import Llama


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, so that ids stay below the tiny model's vocabulary of 300."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def guesser(tiny_model: Llama, tokenizer: PreTrainedTokenizerFast) -> Llama:
    """The tiny model, saying nearly always some hexadecimal digit: right by chance, so that accuracies differ."""
    digits = jnp.array([tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789abcdef"])
    guesser = nnx.clone(tiny_model)
    head = guesser.head[...]
    guesser.head = nnx.Param(jnp.zeros_like(head).at[:, digits].set(0.5 * head[:, digits]))
    return guesser
