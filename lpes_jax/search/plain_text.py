"""Plain text that factors must not make less likely: windows of a file, or text that the model writes itself.

Letters: W windows, T tokens.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lpes_jax.errors import UserError
from lpes_jax.finite import not_finite
from lpes_jax.models.llama.generate import continuation
from lpes_jax.models.llama.method import of_table
from lpes_jax.models.llama.model import Llama, check_ids
from lpes_jax.tasks.perplexity import Perplexity

GENERATED_WINDOWS = 64


def text_windows(
    text: Path | None, model: Llama, tokenizer: Any, seed: int, length: int, most: int = 256
) -> Int[np.ndarray, "W T"]:
    """At most `most` windows of `length` tokens: evenly over the search part (the first 40 %) of the file `text`.

    Without a file, `GENERATED_WINDOWS` windows that the model writes, sampled from its own distribution behind its first token
    (BOS, or a random one where the tokenizer has none). Raises UserError for a file that cannot be read or is too short, for
    ids that the model does not have, and where the logits that text is drawn from are not finite.
    """
    length = min(length, model.config.max_position_embeddings)
    if length < 2:
        raise UserError(f"--text-window must be at least 2 tokens, got {length}")
    if text is not None:
        try:
            windows = Perplexity(data=text, window=length).windows(tokenizer, "search")
        except UserError as error:
            raise UserError(str(error).replace("--data", "--text")) from None
        chosen = np.linspace(0, len(windows) - 1, min(len(windows), most)).astype(int)
        ids = np.array([windows[at].ids for at in chosen], np.int32)
        check_ids(model, ids)
        return ids
    first = jax.random.randint(jax.random.key(seed), (GENERATED_WINDOWS, 1), 0, min(len(tokenizer), model.config.vocab_size))
    if (bos := getattr(tokenizer, "bos_token_id", None)) is not None:
        first = jnp.full_like(first, bos)
    check_ids(model, np.asarray(first))
    written, finite = continuation(
        model,
        first.astype(jnp.int32),
        jnp.ones(len(first), jnp.int32),
        of_table(model.config.rope_table(length)),
        jnp.zeros(0, jnp.int32),
        length - 1,
        jax.random.fold_in(jax.random.key(seed), 1),
    )
    windows = np.asarray(jnp.concatenate([first.astype(jnp.int32), written], axis=1))
    if not (well := np.asarray(finite)).all():
        raise not_finite(model, windows[~well].tolist())
    return windows
