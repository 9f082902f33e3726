"""`--to hf`: a folder for transformers, vLLM and SGLang whose files contain the factors.

    gains                          in the query weights (`folded.py`): a model like any other
    factors that all layers share  the divisors of a RoPE entry of type longrope, if the model's own RoPE allows it
    other factors                  modeling_lpes.py beside the weights, which is loaded only with trust_remote_code=True

Letters: L layers, G = 1 or K KV groups, R rotated part of a head.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from lpes_jax.factors import LayerFactors, json_of
from lpes_jax.gains import gains_of_tensors
from lpes_jax.json_files import read_json
from lpes_jax.mark import KEY, Mark
from lpes_jax.models.llama.checkpoint import Checkpoint, load_llama, open_checkpoint
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.rope import expand, inverse_frequencies
from lpes_jax.ship.folded import fold_files
from lpes_jax.ship.folder import base_folder, write_config
from lpes_jax.ship.self_test import write_script, write_self_test

MODELING = Path(__file__).parent / "modeling_lpes.py"
_CLASSES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3", "phi3": "Phi3",
}  # fmt: skip
_LONGROPE_OVER = ("default", "linear", "llama3")  # types that never scale cos and sin, at any length
_STOPS_ROTATION = 1e14  # a divisor: the angle at any position of any model is 0 in float32


def write_hf_folder(
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

    Raises UserError for gains that cannot go into the weights.
    """
    config, lines = checkpoint.config, []
    has_gains = factors.gains is not None and not (factors.gains == 1).all()
    has_rates = not (factors.factors == 1).all()
    if has_gains:
        gains_of_tensors(factors, config)  # raises before anything is written
    more = base_folder(checkpoint, tokenizer, folder, copy)
    if has_gains:
        lines.append(fold_files(folder, config, factors).line())
    rates = longrope(config, factors) if has_rates else {}
    rates_in = "rope_scaling" if rates else None
    rest = None  # the factors that are neither in the weights nor in RoPE
    if rates is None:
        write_config(folder, more)
        rest = replace(factors, gains=None, gains_granularity=None)
        rates, rates_in = _remote_code(folder, config, factors), MODELING.name
        lines.append(f"factors: in {rates_in}, which is loaded only with trust_remote_code=True")
    elif rates:
        lines.append("factors: the same in all layers, as divisors of a RoPE of type longrope")
    mark = Mark(factors.sha256, gains="query weights" if has_gains else None, rates=rates_in)
    # lpes_jax does not run modeling_lpes.py, so the model is read before config.json names that file.
    written = load_llama(open_checkpoint(folder), "float32") if self_test and rest is not None else None
    write_config(folder, more | rates | {KEY: mark.record})
    factors.save(folder / "factors.json")
    if not self_test:
        return lines
    written = written or load_llama(open_checkpoint(folder), "float32")
    lines += write_self_test(folder, written, rest, load_llama(checkpoint, "float32"), factors, tokenizer)
    return lines + write_script(folder)


def longrope(config: LlamaConfig, factors: LayerFactors) -> dict[str, Any] | None:
    """Keys of config.json that divide RoPE's frequencies by factors that all layers share; None if that is not possible.

    Both lists are equal, and the trained window is the whole window. So no reader scales cos and sin, not even one that ignores
    `attention_factor`.
    """
    rope, half = config.rope, config.rotary_dim // 2
    rows: Float[np.ndarray, "L G half"] = np.asarray(
        expand(jnp.asarray(factors.factors, jnp.float32), half, factors.granularity)
    )
    rotating = np.delete(rows, list(config.nope_layers), axis=0).reshape(-1, half)
    if rope.rope_type not in _LONGROPE_OVER or not len(rotating) or (rotating != rotating[0]).any():
        return None
    divisors = rotating[0].astype(np.float64)
    if rope.rope_type != "default":
        unscaled = rope.rope_theta ** (-np.arange(0, 2 * half, 2) / (2 * half))
        divisors *= unscaled / np.asarray(inverse_frequencies(rope, config.head_dim), np.float64)
    # The fewest digits that give the same float32.
    shared = [float(str(np.float32(divisor))) for divisor in np.minimum(divisors, _STOPS_ROTATION)]
    lists, window = {"short_factor": shared, "long_factor": shared}, config.max_position_embeddings
    entry = {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": window,
    } | lists
    if config.model_type == "phi3":  # transformers 4 accepts only these three keys
        entry = {"type": "longrope"} | lists
    head_dim = {} if config.model_type == "phi3" else {"head_dim": config.head_dim}  # transformers 4 accepts no null here
    partial = {} if rope.partial_rotary_factor == 1 else {"partial_rotary_factor": rope.partial_rotary_factor}
    return {
        "rope_theta": rope.rope_theta,
        "rope_scaling": entry,
        "rope_parameters": {"rope_theta": rope.rope_theta, **partial, **entry},
        "original_max_position_embeddings": window,
        **head_dim,
        **partial,
    }


def _remote_code(folder: Path, config: LlamaConfig, factors: LayerFactors) -> dict[str, Any]:
    """Write modeling_lpes.py for the model's family. Returns the keys of config.json that it needs."""
    kind, family = config.model_type, _CLASSES[config.model_type]
    code = MODELING.read_text(encoding="utf-8").replace("llama", kind).replace("Llama", family)
    (folder / MODELING.name).write_text(code, encoding="utf-8")
    spelled = read_json(folder / "config.json", dict)
    keys = ("rope_theta", "rope_scaling", "rope_parameters")
    locked = {"rope_type": "lpes"}
    return {
        "model_type": f"lpes_{kind}",
        "architectures": ["LpesForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_lpes.LpesConfig",
            "AutoModel": "modeling_lpes.LpesModel",
            "AutoModelForCausalLM": "modeling_lpes.LpesForCausalLM",
        },
        "lpes_rates": {"factors": json_of(factors.factors), "granularity": factors.granularity},
        "lpes_rope": {key: spelled.get(key) for key in keys},
        "rope_scaling": locked,
        "rope_parameters": locked,
    }
