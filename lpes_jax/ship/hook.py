"""`--to hf-hook`: the unchanged model, its factors, and a torch module that applies them to a loaded model."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lpes_jax.api import logits
from lpes_jax.factors import FORMAT, LayerFactors
from lpes_jax.generation import generate_ids
from lpes_jax.models.llama.checkpoint import Checkpoint, load_llama
from lpes_jax.models.llama.model import Llama
from lpes_jax.same_model import facts
from lpes_jax.ship.folder import base_folder, write_config
from lpes_jax.tasks.prompts import token_ids

_TORCH, _COPY = Path(__file__).parent.parent / "torch.py", "lpes_torch.py"
_BEST, _NEW = 8, 8  # logits per position, and new tokens, that the self-test compares
_TEXT = """Models do not read a long prompt evenly. They find facts at its beginning and at its end, and often lose facts in
the middle, although the whole prompt is within the window. Rotary embeddings rotate each query and each key by an angle that
grows with its position. Dividing the positions of one layer by a factor makes that layer look further, or closer, than it was
trained to. Key 4f0c belongs to value 93ab, key 71d8 to value 05e2, and key c3b6 to value 8e17. Which belongs to 71d8?
"""


def write_hook_folder(
    checkpoint: Checkpoint,
    tokenizer: Any,
    folder: Path,
    factors: LayerFactors,
    *,
    found_for: dict[str, Any],
    copy: bool = False,
    self_test: bool = True,
) -> list[str]:
    """Fill an empty folder. Returns lines to print, with {out} for the folder's final path.

    `found_for` is the result of `check_model` for the factors.
    """
    more = base_folder(checkpoint, tokenizer, folder, copy)
    models = {"model": facts(checkpoint.config), "rope": checkpoint.config.rope.to_hf(), "found_for": found_for}
    # With the factors, config.json names two models: the exported one, and the one that they were found for.
    write_config(folder, more | {"lpes_factors": {"format": FORMAT, **factors.numbers, **models}})
    factors.save(folder / "factors.json")
    shutil.copyfile(_TORCH, folder / _COPY)
    if not self_test:
        return []
    recorded = _recorded(load_llama(checkpoint, "float32"), tokenizer, factors)
    (folder / "self_test.json").write_text(json.dumps(recorded) + "\n", encoding="utf-8")
    return [f"to try it with torch and transformers: python {{out}}/{_COPY}"]


def _recorded(model: Llama, tokenizer: Any, factors: LayerFactors) -> dict[str, Any]:
    """A prompt within the trained window, the best logits at each position, and the greedy continuation."""
    config = model.config
    window = min(config.rope.original_max_position_embeddings or config.max_position_embeddings, config.max_position_embeddings)
    ids = token_ids(tokenizer, [_TEXT])[0][: max(1, window - _NEW)]
    best, best_ids = jax.lax.top_k(logits(model, jnp.array([ids], jnp.int32), factors)[0], min(_BEST, config.vocab_size))
    new = generate_ids(model, [ids], factors=factors, max_new_tokens=_NEW)[0]
    return {"text": _TEXT, "ids": ids, "best_ids": best_ids.tolist(), "best_logits": best.tolist(), "new_ids": new}
