"""The arguments of our model in `--model_args` of lm-evaluation-harness: all of those of its own `hf` model, and three more.

    settings = read_arguments({"pretrained": "tiny-retriever", "enable_thinking": "False"})

Values come from a command line, from YAML or from Python. "True", "None" and digits are therefore converted, unless the
argument is a text. `lpes_jax.lm_eval` documents each argument. This module does not import the harness.
"""

import ast
import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lpes_jax.errors import UserError
from lpes_jax.limits import BOUNDS, MOST_TOKENS, Bound, check_number

_WORDS = {"true": True, "false": False, "none": None, "null": None}
_OF_THE_HARNESS = (  # template variables that the harness and transformers set themselves
    *("conversation", "conversations", "messages", "template", "tokenizer"),
    *("tokenize", "add_generation_prompt", "continue_final_message"),
)


@dataclass(frozen=True)
class ModelArguments:
    """Arguments that are valid by themselves; ids are checked when the model is known."""

    pretrained: str = "tiny-retriever"
    factors: str | None = None
    other_model: bool | None = None
    revision: str | None = None
    tokenizer: Any = None  # a name, or a tokenizer of transformers
    dtype: str = "auto"
    batch_size: int | None = None
    max_length: int | None = None
    max_gen_toks: int | None = None
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    enable_thinking: bool | None = None
    think_end_token: int | str | None = None
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    device: str | None = None  # this one and the two below have no effect
    max_batch_size: int | None = None
    offload_folder: str | None = None


def read_arguments(given: Mapping[str, Any]) -> ModelArguments:
    """Check and convert the arguments. Raises UserError, with the argument's name and the way out, for an invalid one."""
    for name, value in given.items():
        if name in UNUSED:
            harmless, way_out = UNUSED[name]
            if _plain(value) not in harmless:
                raise UserError(f"{_named(name)} cannot be {value!r:.60} here: {way_out}")
        elif name not in TAKEN:
            close = difflib.get_close_matches(name, [*TAKEN, *UNUSED], n=1)
            hint = f"did you mean {close[0]}?" if close else f"the arguments are {', '.join(TAKEN)}"
            raise UserError(f"{name:.60} is not an argument of --model_args; {hint}")
    settings = ModelArguments(**{name: TAKEN[name](_named(name), value) for name, value in given.items() if name in TAKEN})
    if settings.enable_thinking and settings.think_end_token is None:
        raise UserError(
            f"{_named('enable_thinking')} needs think_end_token, the text or id that ends the thoughts, "
            "or they would be taken for the answer"
        )
    return settings


def _named(name: str) -> str:
    """The user's name for an argument: three are also flags of the harness."""
    return f"--{name}" if name in ("batch_size", "max_batch_size", "device") else f"{name} in --model_args"


def _plain(value: Any) -> Any:
    """Convert a text such as "True" or "none" to its value, and a dtype of torch to its name."""
    if type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    return _WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value


def _text(what: str, value: Any) -> str:
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int | float):
        raise UserError(f"{what} must be a text, got the number {value!r:.40}; put it in two pairs of quotes: '\"...\"'")
    raise UserError(f"{what} must be a text, got {value!r:.60}")


def _optional_text(what: str, value: Any) -> str | None:
    return None if value is None else _text(what, value)


def _flag(what: str, value: Any) -> bool | None:
    plain = _plain(value)
    if plain in (None, True, False):
        return None if plain is None else bool(plain)
    raise UserError(f"{what} must be True or False, got {value!r:.60}")


def _whole(bound: Bound) -> Callable[[str, Any], int | None]:
    def read(what: str, value: Any) -> int | None:
        number = _plain(value)
        if isinstance(number, str) and number.strip().isdecimal() and len(number) < 20:
            number = int(number)
        if number is None:
            return None
        check_number(what, number, bound)
        return int(number)

    return read


def _batch_size(what: str, value: Any) -> int | None:
    """None for `auto` and for `auto:N`, with which `hf` determines the size N times."""
    kind, _, times = str(value).partition(":")
    if kind != "auto":
        return _whole(BOUNDS["batch_size"])(what, value)
    try:
        valid = float(times or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise UserError(f"{what} must be a whole number, auto or auto:N, got {value!r:.60}")
    return None


def _revision(what: str, value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):  # the harness's command line converts digits
        value = str(value)
    return _optional_text(what, value)


def _tokenizer(what: str, value: Any) -> Any:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    if isinstance(value, PreTrainedTokenizerBase):
        if not isinstance(value, PreTrainedTokenizerFast):
            raise UserError(
                f"{what}: {type(value).__name__} is not a fast tokenizer; give one, or a folder with tokenizer.json"
            )
        return value
    return _optional_text(what, value)


def _dtype(what: str, value: Any) -> str:
    plain = _plain(value)
    return "auto" if plain is None else _text(what, plain)


def _think_end(what: str, value: Any) -> int | str | None:
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not (value is None or isinstance(value, int | str)) or value == "":
        raise UserError(f"{what} must be a text or a token id, got {value!r:.60}")
    return value


def _chat_template_args(what: str, value: Any) -> dict[str, Any]:
    found = _plain(value)
    for read in (json.loads, ast.literal_eval):
        if isinstance(found, str):
            try:
                found = read(found)
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                continue
    if found is None:
        return {}
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise UserError(f'{what} must be a mapping of names to values, as {{"reasoning_effort": "low"}}, got {value!r:.60}')
    if taken := [name for name in found if name in _OF_THE_HARNESS]:
        raise UserError(f"{what}: the harness itself sets {taken[0]}; remove it")
    return dict(found)


# The accepted arguments, and the functions that read them.
TAKEN: dict[str, Callable[[str, Any], Any]] = {
    "pretrained": _text,
    "factors": _optional_text,
    "other_model": _flag,
    "revision": _revision,
    "tokenizer": _tokenizer,
    "dtype": _dtype,
    "batch_size": _batch_size,
    "max_length": _whole(Bound(1, MOST_TOKENS, "tokens of a request")),
    "max_gen_toks": _whole(BOUNDS["max_new_tokens"]),
    "add_bos_token": _flag,
    "prefix_token_id": _whole(Bound(0, 2**31, "a token id")),
    "enable_thinking": _flag,
    "think_end_token": _think_end,
    "chat_template_args": _chat_template_args,
    "device": _optional_text,
    "max_batch_size": _whole(BOUNDS["batch_size"]),
    "offload_folder": _optional_text,
}

_BOOLEANS = (None, True, False)
_ONE_DEVICE = "the model runs on one device; remove it"
_MEMORY = "JAX's own settings limit the memory (XLA_PYTHON_CLIENT_MEM_FRACTION); remove it"
_QUANTISED = "give a .gguf file of the model, or its weights before quantisation"
# Arguments of `hf` that this model does not need: the values without effect, and the way out for any other value.
UNUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "backend": (("default", "causal"), "only decoder-only models run here"),
    "subfolder": ((None, ""), "give the folder itself: pretrained=FOLDER/SUBFOLDER"),
    "truncation": ((None, False), "a request that is too long always loses its beginning; remove it"),
    "logits_cache": (_BOOLEANS, "shared prefixes of prompts are always computed once; remove it"),
    "softmax_dtype": ((None, "float32"), "log-likelihoods are always computed in float32; remove it"),
    "mixed_precision_dtype": ((None,), "give dtype, which applies to everything"),
    "trust_remote_code": (_BOOLEANS, "code that comes with a model is never run; remove it"),
    "use_fast_tokenizer": ((None, True), "only fast tokenizers are supported; remove it"),
    "parallelize": ((None, False), _ONE_DEVICE),
    "max_memory_per_gpu": ((None,), _MEMORY),
    "max_cpu_memory": ((None,), _MEMORY),
    "tp_plan": ((None,), _ONE_DEVICE),
    "peft": ((None,), "merge the adapter once (merge_and_unload, save_pretrained) and give that folder as pretrained"),
    "delta": ((None,), "add it to the model once (save_pretrained) and give that folder as pretrained"),
    "autogptq": ((None, False), _QUANTISED),
    "gptqmodel": ((None, False), _QUANTISED),
    "gguf_file": ((None,), "give the file itself: pretrained=FOLDER/FILE.gguf"),
}
