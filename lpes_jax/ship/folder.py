"""The common part of all folders for transformers: weights, other files of the model, and keys for versions 4 and 5."""

import json
import shutil
from pathlib import Path
from typing import Any

from lpes_jax.json_files import read_json
from lpes_jax.models.llama.checkpoint import Checkpoint, is_tied, load_llama, save_llama
from lpes_jax.models.llama.tokenizer import stop_ids
from lpes_jax.store.files import write_json

_TOKENIZER = "tokenizer.json"
# Left out beside tokenizer.json: it and tokenizer_config.json have the same entries, but readers would prefer these files.
_OLDER_TOKENIZER_FILES = ("special_tokens_map.json", "added_tokens.json", "tekken.json")
_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".md")  # of a model's other files
_EXPORT_FILES = ("exported.json", "factors.json", "self_test.json")  # left out if an exported model is exported again


def base_folder(checkpoint: Checkpoint, tokenizer: Any, folder: Path, copy: bool) -> dict[str, Any]:
    """Fill an empty folder with the unchanged model. Returns further entries for its config.json.

    The weights of a Hugging Face folder are links, or with `copy` copies; those of a .gguf file become float32 safetensors.
    """
    source, more = checkpoint.path, {"tie_word_embeddings": is_tied(checkpoint)}
    if source.is_dir():
        _take_files(checkpoint, folder, copy)
    else:
        save_llama(load_llama(checkpoint, "float32"), folder)
        shutil.copymode(
            folder / "config.json", folder / "model.safetensors"
        )  # safetensors makes it readable only for its owner
        more |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": stop_ids(source, tokenizer)}
    if not source.is_dir() or (source / _TOKENIZER).exists():
        tokenizer.save_pretrained(folder)
    _let_transformers_4_read_the_tokenizer(folder)
    return more


def write_config(folder: Path, more: dict[str, Any]) -> None:
    """Write the folder's config.json with `more`, and with its RoPE also in the keys of transformers 4."""
    config = read_json(folder / "config.json", dict)
    if (rope := config.get("rope_parameters")) and not config.get("rope_scaling"):
        # Version 4 ignores rope_parameters, and would take a theta of 10,000.
        rope = dict(rope)
        config["rope_theta"] = rope.pop("rope_theta", config.get("rope_theta"))
        if partial := rope.pop("partial_rotary_factor", None):
            config["partial_rotary_factor"] = partial
        config["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    write_json(folder / "config.json", config | more)


def _take_files(checkpoint: Checkpoint, folder: Path, copy: bool) -> None:
    """The weights of a Hugging Face folder as links or copies, and copies of its other files."""
    left_out = _OLDER_TOKENIZER_FILES if (checkpoint.path / _TOKENIZER).exists() else ()
    for file in sorted(checkpoint.path.iterdir()):
        named = file.suffix in _SUFFIXES or file.name.startswith(("LICENSE", "NOTICE"))
        if file.is_file() and named and file.name not in (*left_out, *_EXPORT_FILES):
            shutil.copyfile(file, folder / file.name)
    for file in checkpoint.weight_files():
        if copy:
            shutil.copyfile(file, folder / file.name)
        else:
            (folder / file.name).symlink_to(file.resolve())


def _let_transformers_4_read_the_tokenizer(folder: Path) -> None:
    """Rewrite tokenizer_config.json so that transformers 4 and 5 both run the folder's tokenizer.json.

    Version 5 writes a class that has another name in version 4, and that passes token types to the model there by default.
    Version 4 refuses a list as `extra_special_tokens`, and replaces the `add_prefix_space` of a pre-tokenizer by this file's.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path, dict) if path.exists() else {}
    for key in ("is_local", "local_files_only"):  # arguments of the call that read it
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
