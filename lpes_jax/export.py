"""Write a model together with its factors as a folder for transformers: neither jax nor lpes_jax is needed there.

Examples:
  python -m lpes_jax.export --factors RUN/factors.json --output-path OUT
      the bundled model, with the factors that a search found
  python -m lpes_jax.export --model smollm2-135m-instruct --factors best-kv-5-10-20 --output-path OUT
      a GGUF file, with factors of the zoo: its weights are written as float32 safetensors
  python -m lpes_jax.export --model DIR --factors RUN/factors.json --copy --output-path OUT
      a folder that can be moved to another machine

OUT gets the model's files (the weights as links, without --copy), config.json with the factors under "lpes_factors",
factors.json, lpes_torch.py, whose apply_layer_factors(model) puts the factors into a loaded model, and self_test.json: what
`python OUT/lpes_torch.py` compares torch with. from_pretrained(OUT) alone gives the model without factors.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from safetensors import SafetensorError

from lpes_jax import output, process
from lpes_jax.api import logits
from lpes_jax.cli import run_verb
from lpes_jax.errors import UserError
from lpes_jax.factors import FORMAT, LayerFactors, write_json
from lpes_jax.generation import generate_ids
from lpes_jax.json_files import read_json
from lpes_jax.limits import check_bounds
from lpes_jax.models.llama.checkpoint import Checkpoint, is_tied, load_llama, open_checkpoint, save_llama
from lpes_jax.models.llama.model import Llama
from lpes_jax.models.llama.tokenizer import load_tokenizer, stop_ids
from lpes_jax.models.zoo import resolve
from lpes_jax.report.tables import show
from lpes_jax.same_model import check_model, facts
from lpes_jax.settings.export import ExportSettings
from lpes_jax.tasks.prompts import token_ids

_TORCH, _THERE = Path(__file__).parent / "torch.py", "lpes_torch.py"
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


def run_export(settings: ExportSettings) -> Path:
    """Write the folder and return its path.

    It appears whole or not at all. Raises UserError where it is not empty, where the factors do not fit the model or are
    another's, and where the model cannot be loaded.
    """
    check_bounds(settings)
    target = settings.run.output_path
    if settings.factors.factors is None:
        raise UserError("--factors: give the factors.json of a search, or factors of the zoo by name (MODEL/NAME)")
    output.check(target, "export", overwrite=settings.run.overwrite)
    replaces = (target / _THERE).exists()
    if target.exists() and any(target.iterdir()) and not replaces:
        raise UserError(f"--output-path {target}: exists and is not empty; give another, or remove it")
    factors = LayerFactors.load(settings.factors.factors)
    source = resolve(settings.run.model)
    if replaces and target.resolve() in (source.resolve(), *source.resolve().parents):
        raise UserError(f"--output-path {target} holds the model that is to be exported; give another folder")
    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    tokenizer = load_tokenizer(source)
    found_for = check_model(
        factors,
        config,
        tokenizer=tokenizer,
        sha256=checkpoint.sha256() if factors.model.get("sha256") else None,
        other_model=settings.factors.other_model,
        where=str(settings.factors.factors),
    )
    ends = {} if source.is_dir() else {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": stop_ids(source, tokenizer)}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(target) as temporary:
            folder = Path(temporary) / "export"
            folder.mkdir()
            model = None
            if source.is_dir():
                _take_files(checkpoint, folder, settings.files.copy)
            else:
                save_llama(model := load_llama(checkpoint, "float32"), folder)
                shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors': for its owner alone
            if not source.is_dir() or (source / _TOKENIZER).exists():
                tokenizer.save_pretrained(folder)
            models = {"model": facts(config), "rope": config.rope.to_hf(), "found_for": found_for}
            _write_config(folder, factors, ends | {"tie_word_embeddings": is_tied(checkpoint)}, models)
            _let_transformers_4_read_the_tokenizer(folder)
            factors.save(folder / "factors.json")
            shutil.copyfile(_TORCH, folder / _THERE)
            (folder / "self_test.json").unlink(missing_ok=True)  # of a folder that was exported before
            if not settings.files.no_self_test:
                recorded = _recorded(model or load_llama(checkpoint, "float32"), tokenizer, factors)
                (folder / "self_test.json").write_text(json.dumps(recorded) + "\n", encoding="utf-8")
            with process.unbroken():
                if replaces:
                    os.rename(target, Path(temporary) / "replaced")
                elif target.exists():
                    target.rmdir()
                os.rename(folder, target)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--output-path {target}: cannot be written ({' '.join(str(error).split())})") from error
    tried = [] if settings.files.no_self_test else [f"try it where torch and transformers are: python {target / _THERE}"]
    show(f"exported: {target}", *tried)
    return target


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[str]:
    """A folder beside `target`, which is removed in the end, also where a signal is that."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name[:32]}-") as folder:

        def remove() -> None:
            for _ in range(20):  # files may still be written there
                shutil.rmtree(folder, ignore_errors=True)
                if not os.path.exists(folder):
                    break

        with process.cleaning(remove):
            yield folder


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


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_verb(ExportSettings(), run_export, __doc__ or "", arguments, "export")


if __name__ == "__main__":
    sys.exit(process.ended(main()))
