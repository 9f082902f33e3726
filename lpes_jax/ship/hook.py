"""`--to hf-hook`: the model as it is, with its factors beside it and a torch module that puts them into a loaded model."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lpes_jax.api import logits
from lpes_jax.factors import FORMAT, LayerFactors
from lpes_jax.generation import generate_ids
from lpes_jax.json_files import read_json
from lpes_jax.models.llama.checkpoint import Checkpoint, is_tied, load_llama, save_llama
from lpes_jax.models.llama.model import Llama
from lpes_jax.models.llama.tokenizer import stop_ids
from lpes_jax.same_model import facts
from lpes_jax.store.files import write_json
from lpes_jax.tasks.prompts import token_ids

_TORCH, _THERE = Path(__file__).parent.parent / "torch.py", "lpes_torch.py"
_TOKENIZER = "tokenizer.json"
# Left out where tokenizer.json is: what they say is in it and in tokenizer_config.json, and readers that find them go by them.
_OLDER_TOKENIZER_FILES = ("special_tokens_map.json", "added_tokens.json", "tekken.json")
_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".md")  # of a model's files beside its weights
_BEST, _NEW = 8, 8  # logits of a position, and new tokens, that the self-test compares
_TEXT = """A long prompt is not read evenly. What stands at its begin and at its end is found again, and what stands between
them is often lost, although every word of it was within the window. Rotary embeddings turn each query and each key by an angle
that grows with its position; dividing the positions of one layer by a factor lets that layer look further, or closer, than it
was trained to. Key 4f0c belongs to value 93ab, key 71d8 to value 05e2, and key c3b6 to value 8e17. Which belongs to 71d8?
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
    """Fill an empty folder. Returns lines to print, with {out} for the folder's path in the end.

    `found_for` is what `check_model` says of the factors.
    """
    source = checkpoint.path
    ends = {} if source.is_dir() else {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": stop_ids(source, tokenizer)}
    model = None
    if source.is_dir():
        _take_files(checkpoint, folder, copy)
    else:
        save_llama(model := load_llama(checkpoint, "float32"), folder)
        shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors': for its owner alone
    if not source.is_dir() or (source / _TOKENIZER).exists():
        tokenizer.save_pretrained(folder)
    models = {"model": facts(checkpoint.config), "rope": checkpoint.config.rope.to_hf(), "found_for": found_for}
    _write_config(folder, factors, ends | {"tie_word_embeddings": is_tied(checkpoint)}, models)
    _let_transformers_4_read_the_tokenizer(folder)
    factors.save(folder / "factors.json")
    shutil.copyfile(_TORCH, folder / _THERE)
    (folder / "self_test.json").unlink(missing_ok=True)  # of a folder that was exported before
    if not self_test:
        return []
    recorded = _recorded(model or load_llama(checkpoint, "float32"), tokenizer, factors)
    (folder / "self_test.json").write_text(json.dumps(recorded) + "\n", encoding="utf-8")
    return [f"try it where torch and transformers are: python {{out}}/{_THERE}"]


def _take_files(checkpoint: Checkpoint, folder: Path, copy: bool) -> None:
    """The weights of a Hugging Face folder as links or copies, and copies of what stands beside them."""
    left = _OLDER_TOKENIZER_FILES if (checkpoint.path / _TOKENIZER).exists() else ()
    for file in sorted(checkpoint.path.iterdir()):
        named = file.suffix in _SUFFIXES or file.name.startswith(("LICENSE", "NOTICE"))
        if file.is_file() and named and file.name not in left:
            shutil.copyfile(file, folder / file.name)
    for file in checkpoint.weight_files():
        if copy:
            shutil.copyfile(file, folder / file.name)
        else:
            (folder / file.name).symlink_to(file.resolve())


def _let_transformers_4_read_the_tokenizer(folder: Path) -> None:
    """tokenizer_config.json as transformers 4 and 5 read it: the folder's tokenizer.json is what runs in both.

    The class that 5 writes has another name in 4, and there by default hands the model token types. 4 takes a list of special
    tokens for `extra_special_tokens` as an error, and changes the `add_prefix_space` of a pre-tokenizer to what it finds here.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path, dict) if path.exists() else {}
    for key in ("is_local", "local_files_only"):  # of how it was read here
        config.pop(key, None)
    if isinstance(tokens := config.get("extra_special_tokens"), list):
        config["extra_special_tokens"] = {}  # a dict of tokens by their names, as 4 writes it
        older = config.get("additional_special_tokens") or []
        config["additional_special_tokens"] = older + [token for token in tokens if token not in older]
    if config.get("tokenizer_class") == "TokenizersBackend":
        config = {"model_input_names": ["input_ids", "attention_mask"]} | config
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        words = json.loads((folder / _TOKENIZER).read_text(encoding="utf-8")).get("pre_tokenizer") or {}
        if "add_prefix_space" in words:
            config["add_prefix_space"] = words["add_prefix_space"]
    if config:
        write_json(path, config)


def _write_config(folder: Path, factors: LayerFactors, more: dict[str, Any], models: dict[str, Any]) -> None:
    """The config that lies there, with `more`, and its RoPE in the spelling of transformers 4 too.

    The factors stand there with what they say of models: the one that is exported, and the one that they were found for.
    """
    config = read_json(folder / "config.json", dict) | more
    if (rope := config.get("rope_parameters")) and not config.get("rope_scaling"):
        # Version 4 ignores rope_parameters, and would take a theta of 10,000.
        rope = dict(rope)
        config["rope_theta"] = rope.pop("rope_theta", config.get("rope_theta"))
        if partial := rope.pop("partial_rotary_factor", None):
            config["partial_rotary_factor"] = partial
        config["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    config["lpes_factors"] = {"format": FORMAT, **factors.numbers, **models}
    write_json(folder / "config.json", config)


def _recorded(model: Llama, tokenizer: Any, factors: LayerFactors) -> dict[str, Any]:
    """A prompt within the trained window, the best logits at each of its positions, and its greedy continuation."""
    config = model.config
    window = min(config.rope.original_max_position_embeddings or config.max_position_embeddings, config.max_position_embeddings)
    ids = token_ids(tokenizer, [_TEXT])[0][: max(1, window - _NEW)]
    best, best_ids = jax.lax.top_k(logits(model, jnp.array([ids], jnp.int32), factors)[0], min(_BEST, config.vocab_size))
    new = generate_ids(model, [ids], factors=factors, max_new_tokens=_NEW)[0]
    return {"text": _TEXT, "ids": ids, "best_ids": best_ids.tolist(), "best_logits": best.tolist(), "new_ids": new}
