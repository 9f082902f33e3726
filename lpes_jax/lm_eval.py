"""EleutherAI's lm-evaluation-harness with a model and its factors: the harness's own command line, with one more --model.

Examples:
  python -m lpes_jax.lm_eval run --model lpes_jax --model_args pretrained=tiny-retriever --tasks arc_easy --batch_size auto
      a model without factors
  python -m lpes_jax.lm_eval run --model lpes_jax --model_args pretrained=DIR,factors=RUN/factors.json --tasks arc_easy
      with the factors of a search; factors=NAME uses the zoo's

The harness does not find models by itself: its `lm_eval` command knows this model only after `lpes_jax.lm_eval` was imported.
Requests are encoded, truncated and stopped as in the harness's own `hf` model, and shared prefixes of prompts are computed
once. Generation is greedy. With RoPE of the types `dynamic` and `longrope`, the longest request of a call determines the table.

`--model_args` accepts all arguments of `hf` (0.4.13), with the same meaning, or refuses them in one line:

    pretrained          a model, as every verb's --model
    revision            branch, tag or commit of a hub model (and of a hub tokenizer); refused for other models
    tokenizer           replaces the model's own: a zoo name, a folder, a .gguf file or a hub id
    dtype               auto (bfloat16 on a GPU, float32 on a CPU), float32, bfloat16, float16
    batch_size          requests per pass, or auto, by the device's memory (auto:N is the same)
    max_length          the limit of tokens of a request; by default the model's window
    add_bos_token       true or false; overrides the tokenizer's own setting
    prefix_token_id     the token that the first token of a text is predicted from; by default BOS, else EOS
    enable_thinking     true or false, for the chat template. With true, tasks of log-likelihoods are refused
    think_end_token     the end of the thoughts: an id, or a text. The answer follows its last occurrence
    chat_template_args  more variables for the chat template, as {"reasoning_effort": "low"}; `chat_template` names a template
                        or is one. On the command line a space must precede it:
                        --model_args pretrained=M 'chat_template_args={"x": 1}'

    factors, other_model, max_gen_toks
                        ours: a factors.json or the zoo's by name; accept factors of another model; new tokens for tasks that
                        set no number

These have no effect: device (JAX uses the device that it finds; JAX_PLATFORMS chooses), max_batch_size, logits_cache,
trust_remote_code (code that comes with a model is never run) and offload_folder. Other arguments are accepted with values that
change nothing, such as backend=causal or parallelize=False, and refused otherwise, with the way out. Arguments that `hf` would
pass on to transformers (load_in_8bit, ...) are refused.

Differences from `hf`:

- An argument of --model_args that is also a flag (batch_size, device) is no error, unless the two disagree.
- With a think_end_token, stop texts end the answer and not the thoughts, for every batch size. `hf` stops when all texts of a
  batch contain a stop text, anywhere.
- A think_end_token that no decoded text contains (a special token, as text) is refused; its id works.
- --apply_chat_template NAME renders the template of that name; `hf` records the name and renders the default.
- A file of --use_cache holds the answers of one model with its factors and settings; the answers of another are refused.

Needs the extra `lm-eval` (lm-evaluation-harness 0.4.13 or later).
"""

import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lpes_jax import process
from lpes_jax.compilation import keep_programs
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.finite import not_finite
from lpes_jax.generation import generate_ids
from lpes_jax.lm_eval_arguments import read_arguments
from lpes_jax.memory import out_of_memory, tokens_that_fit, tokens_worth_it
from lpes_jax.models.llama import load, templates
from lpes_jax.models.llama.method import table_method
from lpes_jax.models.llama.model import check_ids
from lpes_jax.prefixes import padded, round_up
from lpes_jax.running import fail, full_memory
from lpes_jax.same_model import check_loaded, tokenizer_sha256
from lpes_jax.scoring import Scorer
from lpes_jax.tasks.prompts import EncodedPrompt
from lpes_jax.text_nll import token_nll

try:
    from jinja2 import TemplateError
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import get_rolling_token_windows, simple_parse_args_string  # pyright: ignore[reportMissingImports]
    from tqdm import tqdm
except ImportError as error:
    message = f"lpes_jax.lm_eval needs lm-evaluation-harness ({error}): pip install 'lpes-jax[lm-eval]'"
    if __name__ == "__main__":
        sys.exit(fail(message))
    raise UserError(message) from error

_CHUNK = 256  # positions of a row whose logits are in memory at once
_NEW_TOKENS = 256  # per output, as in `hf`
_GREEDY = ("do_sample", "temperature", "top_p", "top_k", "until", "max_gen_toks")  # what greedy generation uses or can ignore
_NO_EFFECT = {  # values of other settings that have no effect
    **{"num_beams": (1, None), "num_return_sequences": (1, None), "repetition_penalty": (1, None)},
    **{"length_penalty": (1, None), "no_repeat_ngram_size": (0, None), "use_cache": (True, None), "min_p": (0, None)},
}
_DEFAULTS_OF_FLAGS = (1, "cuda:0")  # of the harness's --batch_size and --device
_ANSWERS_OF = "lpes_jax"  # the key in a file of --use_cache that identifies the model of its answers


@register_model("lpes_jax")
class LayerFactorsLM(TemplateLM):
    """A model with factors for the harness; the top of this file lists the arguments.

    Raises UserError for an invalid argument, and as `load` and `LayerFactors.load`.
    """

    def __init__(self, pretrained: Any = "tiny-retriever", factors: Any = None, **arguments: Any):
        super().__init__()
        settings = read_arguments({"pretrained": pretrained, "factors": factors, **arguments})
        _note_device(settings.device)
        found = None if settings.factors is None else LayerFactors.load(settings.factors)
        loaded = load(settings.pretrained, settings.dtype, revision=settings.revision, tokenizer=settings.tokenizer)
        config = loaded.model.config
        self._settings, self._loaded, self._model = settings, loaded, loaded.model
        self.tokenizer: Any = loaded.tokenizer
        self._factors = LayerFactors.uniform(1.0, config.num_layers) if found is None else found
        self._factors_model = None
        if found is not None:
            self._factors_model = check_loaded(found, loaded, str(settings.factors), bool(settings.other_model))
        self._batch_size = settings.batch_size
        self.max_length = settings.max_length or config.max_position_embeddings
        self.max_gen_toks = settings.max_gen_toks or _NEW_TOKENS
        self._check_tokens()
        prefixes = (settings.prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        self._prefix_token_id = next((token for token in prefixes if token is not None), None)
        self._template_args = dict(settings.chat_template_args)
        if settings.enable_thinking is not None:
            self._template_args["enable_thinking"] = settings.enable_thinking
        self._template: Any = self._template_args.pop("chat_template", None)
        self._without_system = False  # whether a chat's system message was dropped

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "LayerFactorsLM":
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> "LayerFactorsLM":
        """Make the model from --model_args and the flags --batch_size, --max_batch_size and --device, as the harness does.

        --model_args takes precedence over a flag with its default value. Raises UserError if they contradict each other.
        """
        flags = {name: value for name, value in (additional_config or {}).items() if value is not None}
        for name in flags.keys() & arg_dict.keys():
            if flags[name] not in _DEFAULTS_OF_FLAGS and str(flags[name]) != str(arg_dict[name]):
                raise UserError(
                    f"--{name} is {flags[name]} and {name} in --model_args {arg_dict[name]!s:.40}; give one of them"
                )
        return cls(**(flags | arg_dict))

    def _check_tokens(self) -> None:
        """Raise UserError for ids without an embedding, and for a think_end_token that no decoded text contains."""
        rows, thoughts = self._model.config.vocab_size, self._settings.think_end_token
        for name, token in (("prefix_token_id", self._settings.prefix_token_id), ("think_end_token", thoughts)):
            if isinstance(token, int) and not 0 <= token < rows:
                raise UserError(
                    f"{name} in --model_args is {token}, but the model's embedding has {rows} rows, 0 to {rows - 1}"
                )
        if self._settings.tokenizer is not None and self.tokenizer.vocab_size > rows:
            raise UserError(
                f"tokenizer in --model_args has {self.tokenizer.vocab_size} tokens, but the model's embedding has {rows} rows; "
                "is it the tokenizer of this model?"
            )
        added = self.tokenizer.added_tokens_decoder if isinstance(thoughts, str) else {}
        special = [token for token, flags in added.items() if flags.special and flags.content in str(thoughts)]
        if special:
            raise UserError(
                f"think_end_token in --model_args: {thoughts!r:.60} contains a special token, which decoding removes; "
                f"give the id of its last token, think_end_token={special[-1]}"
            )

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Raise UserError for a file of --use_cache with answers of another model, or of this one with other settings."""
        super().set_cache_hook(cache_hook)
        if (kept := cache_hook.dbdict) is None:
            return
        settings, identity = self._settings, self._loaded.identity
        facts = [identity["sha256"], identity["dtype"], tokenizer_sha256(self.tokenizer), self._factors.numbers]
        facts += [self.max_length, self.max_gen_toks, settings.add_bos_token, self._prefix_token_id, settings.think_end_token]
        ours = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
        if len(kept) == 0:
            kept[_ANSWERS_OF] = ours
        if kept.get(_ANSWERS_OF) != ours:
            raise UserError(
                f"--use_cache: {kept.filename} holds the answers of another model, other factors or other settings; "
                "give each its own path"
            )

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that the first token of a text is predicted from."""
        if self._prefix_token_id is None:
            raise UserError("the tokenizer has no BOS and no EOS; give prefix_token_id in --model_args")
        return self._prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        """The harness's key for cached prompts (--cache_requests): the tokenizer, and everything that changes its chats."""
        name = self._settings.tokenizer if isinstance(self._settings.tokenizer, str) else self._loaded.identity["name"]
        if not self._template_args and self._template is None:
            return str(name).replace("/", "__")
        chats = json.dumps([self._template, self._template_args], sort_keys=True, default=str)
        return f"{name}-{hashlib.sha256(chats.encode()).hexdigest()[:16]}".replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """Ids of a text. Special tokens are the tokenizer's own, unless set otherwise or the text begins with them."""
        special = self._settings.add_bos_token if add_special_tokens is None else add_special_tokens
        prefix = None if self._prefix_token_id is None else self.tokenizer.decode([self._prefix_token_id])
        if add_special_tokens is None and has_bos_prefix(string, prefix):
            special = False
        return self.tokenizer.encode(string, **({} if special is None else {"add_special_tokens": special}))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log p of the continuation, whether it is the greedy one) for each (context, continuation)."""
        if self._settings.enable_thinking:
            tasks = sorted({str(request.task_name) for request in requests if getattr(request, "task_name", None)})
            raise UserError(
                f"enable_thinking: {', '.join(tasks) or 'a task'} scores given answers, which have no thoughts before them; "
                "remove enable_thinking, or use tasks that generate"
            )
        if any(request.args == ("", "") for request in requests):
            raise UserError("a request has neither a context nor a continuation; the model scores at least 1 token")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **ignored: Any
    ) -> list[tuple[float, bool]]:
        """(log p of the continuation, whether it is the greedy one) for each request: its texts, and the ids of both."""
        if not requests:
            return []
        prompts = []
        for (_, text), context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens ({text[:40]!r}): the model scores 1 to {self.max_length}"
                )
            kept = (context + continuation)[-(self.max_length + 1) : -len(continuation)]  # the last id is only predicted
            prompts.append(EncodedPrompt(kept, [continuation]))
        with _progress("loglikelihood", len(prompts), disable_tqdm) as on_prompts:
            scorer = Scorer(self._model, prompts, batch_size=self._batch_size)
            found = self._factors
            correct, log_likelihood = scorer(
                found.factors[None],
                found.granularity,
                on_prompts,
                gains=None if found.gains is None else found.gains[None],
                gains_granularity=found.gains_granularity or "layer",
            )
            if len(bad := np.flatnonzero(~np.isfinite(log_likelihood[0]))):
                raise not_finite(self._model, scorer.sequences(int(bad[0])), self._factors)
        answers = list(zip(log_likelihood[0].tolist(), map(bool, correct[0]), strict=True))
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of each whole text, in windows with as much context as the model accepts."""
        windows, counted, request_numbers = [], [], []
        for number, (text,) in enumerate(request.args for request in requests):
            ids = self.tok_encode(text)
            for context, predicted in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append(context + predicted[-1:])
                counted.append(len(predicted))
                request_numbers.append(number)
        totals = np.zeros(len(requests))
        with _progress("loglikelihood_rolling", len(windows), disable_tqdm) as on_windows:
            for window, nll in self._nlls(windows, on_windows):
                scored = nll[len(windows[window]) - counted[window] : len(windows[window])]
                totals[request_numbers[window]] -= scored.sum(dtype=np.float64)
        for request, total in zip(requests, totals.tolist(), strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals.tolist()

    def _nlls(self, windows: list[list[int]], on_windows: Callable[[int], None]) -> list[tuple[int, np.ndarray]]:
        """The number of each window, and -log p of its tokens (and of the padding after them)."""
        if not windows:
            return []
        check_ids(self._model, windows)
        width = round_up(max(map(len, windows)))
        at_once = min(tokens_that_fit(self._model, width, min(width, _CHUNK)), tokens_worth_it(self._model, width)) // width
        size = max(1, min(at_once, len(windows))) if self._batch_size is None else min(self._batch_size, len(windows))
        order = sorted(range(len(windows)), key=lambda number: len(windows[number]))
        nlls: list[tuple[int, np.ndarray]] = []
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            filled = batch + batch[:1] * (size - len(batch))  # as large as the others, for a single compilation
            longest = len(windows[batch[-1]])
            tokens, _ = padded([windows[number] for number in filled], round_up(longest))
            table = self._model.config.rope_table(longest - 1, self._factors)
            values = np.asarray(token_nll(self._model, jnp.asarray(tokens), table_method(table), _CHUNK))
            for ids, nll in zip([windows[number] for number in batch], values, strict=False):
                if not np.isfinite(nll[: len(ids)]).all():
                    raise not_finite(self._model, [ids], self._factors)
            nlls += zip(batch, values, strict=False)
            on_windows(len(batch))
        return nlls

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The greedy continuation of each context, up to one of its `until` texts, the end of text, or max_gen_toks."""
        groups: dict[str, list[int]] = {}  # numbers of requests by their settings
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        outputs = [""] * len(requests)
        with _progress("generate_until", len(requests), disable_tqdm) as on_prompts:
            for group in groups.values():
                chosen = [requests[number] for number in group]
                for number, text in zip(group, self._generated(chosen, on_prompts), strict=True):
                    outputs[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return outputs

    def _generated(self, requests: list[Any], on_prompts: Callable[[int], None]) -> list[str]:
        """Outputs of requests with the same settings."""
        given = requests[0].args[1]
        try:
            settings = normalize_gen_kwargs(given, self.max_gen_toks)
        except (ValueError, TypeError, OverflowError) as error:
            raise UserError(f"--gen_kwargs, or the task's generation_kwargs: a value is of the wrong kind ({error})") from error
        unknown = [name for name in settings if name not in _GREEDY and settings[name] not in _NO_EFFECT.get(name, ())]
        if settings["do_sample"]:
            unknown.append("do_sample" if given.get("do_sample") else "temperature")
        if unknown:
            raise UserError(f"generation is greedy here and cannot use {unknown[0]}; remove it, or give other --gen_kwargs")
        if wrong := [text for text in settings["until"] if text is not None and not isinstance(text, str)]:
            raise UserError(f"until holds {wrong[0]!r:.40}, which is not a text; quote it in --gen_kwargs")
        eos = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        until = handle_stop_sequences([text for text in settings["until"] if text], eos=eos)
        new, thoughts = settings["max_gen_toks"], self._settings.think_end_token
        room = self.max_length - new
        if room < 1:
            raise UserError(f"max_gen_toks {new} leaves no room for a prompt in the {self.max_length} tokens of the model")
        ids = generate_ids(
            self._model,
            [(self.tok_encode(request.args[0]) or [self.prefix_token_id])[-room:] for request in requests],
            factors=self._factors,
            max_new_tokens=new,
            stop=sorted({*self._loaded.stop_ids, *(self._ids_with(until) if thoughts is None else ())}),
            keep_stop=True,
            batch_size=self._batch_size,
            on_prompts=on_prompts,
        )
        if isinstance(thoughts, int):
            ids = [_after_last(output, thoughts) for output in ids]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        if isinstance(thoughts, int):
            texts, thoughts = [text.lstrip() for text in texts], None
        return [postprocess_generated_text(text, until, think_end_token=thoughts) for text in texts]

    def _ids_with(self, until: Sequence[str]) -> list[int]:
        """Ids whose text contains one of `until`, so nothing after them is read. Texts of several tokens stop nothing early."""
        before = self.tokenizer.encode("a", add_special_tokens=False)  # because the first token of a text may lose its space
        texts = self.tokenizer.batch_decode([[*before, token] for token in range(len(self.tokenizer))])
        start = len(self.tokenizer.decode(before))
        return [token for token, text in enumerate(texts) if any(end and end in text[start:] for end in until)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Set the template of --apply_chat_template [NAME] for all chats, and return it for the harness's record.

        Raises UserError for a tokenizer without a template, and for an unknown name.
        """
        if not chat_template:
            return None
        by_name = self.tokenizer.chat_template
        if isinstance(chat_template, str) and isinstance(by_name, dict):
            if chat_template not in by_name:
                raise UserError(
                    f"--apply_chat_template {chat_template:.60}: the tokenizer's chat templates are {', '.join(by_name)}"
                )
            self._template = chat_template
        elif isinstance(chat_template, str) and chat_template != "default" and by_name is not None:
            raise UserError(f"--apply_chat_template {chat_template:.60}: the tokenizer has one chat template; give no name")
        return self._chosen_template()

    def _chosen_template(self) -> str:
        try:
            template = self.tokenizer.get_chat_template(self._template, self._template_args.get("tools"))
        except ValueError as error:
            raise UserError(
                "--apply_chat_template: the tokenizer has no chat template, or several without a default; remove the flag, "
                "name a template, or give another tokenizer in --model_args"
            ) from error
        if not isinstance(template, str) or "{" not in template:  # it would render to itself
            raise UserError(f"--apply_chat_template: {template!r:.60} is neither a chat template nor the name of one")
        return template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat. If the template refuses system messages, they are dropped.

        Raises UserError for a template that fails, or that exceeds its budget (`lpes_jax.models.llama.templates`).
        """
        try:
            return self._rendered(chat_history, add_generation_prompt)
        except TemplateError as error:
            without = [message for message in chat_history if message["role"] != "system"]
            if len(without) == len(chat_history):
                raise _fails(error) from error
        if not self._without_system:
            self._without_system = True
            print("note: --apply_chat_template: the template refuses system messages; they are dropped", file=sys.stderr)
        try:
            return self._rendered(without, add_generation_prompt)
        except TemplateError as error:
            raise _fails(error) from error

    def _rendered(self, chat_history: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """Render a chat. Raises TemplateError if the template refuses it."""
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        template = self._chosen_template()
        try:
            text = templates.render(self.tokenizer, chat_history, template=template, **how, **self._template_args)
            text.encode()  # refuses lone surrogates
        except TemplateError:
            raise
        except Exception as error:  # templates are programs and may raise anything
            raise _fails(error) from error
        return text

    def get_model_info(self) -> dict[str, Any]:
        """The model's entries in the harness's results."""
        identity = self._loaded.identity
        return {
            "model_num_parameters": sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self._model))),
            "model_dtype": identity["dtype"],
            "model_revision": self._settings.revision or "main",
            "model_sha": identity["sha256"],
            "lpes_factors": self._factors.numbers,
            "lpes_factors_model": self._factors_model,
        }


def _note_device(device: str | None) -> None:
    """Print a note if --device names a device that JAX does not use. The flag's default is ignored silently."""
    backend = jax.default_backend()
    if device not in (None, *_DEFAULTS_OF_FLAGS, "cuda", backend, f"{backend}:0"):
        print(f"note: --device {device:.40} is ignored: JAX runs on {backend} (JAX_PLATFORMS chooses)", file=sys.stderr)


def _after_last(ids: list[int], token: int) -> list[int]:
    """The ids after the last `token`, or all ids if there is none."""
    return ids[len(ids) - ids[::-1].index(token) :] if token in ids else ids


def _fails(error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return UserError(
        f"--apply_chat_template: the chat template fails ({reason}); remove the flag, or give another template as "
        "chat_template in chat_template_args"
    )


@contextmanager
def _progress(kind: str, total: int, disable: bool) -> Iterator[Callable[[int], None]]:
    """The harness's progress bar. Yields a function that adds to the count."""
    with tqdm(total=total, disable=disable, desc=f"Running {kind} requests") as bar:

        def done(count: int) -> None:
            bar.update(count)

        yield done


def main() -> int:
    """The harness's command line; returns the exit code."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    try:
        process.check_devices()
        keep_programs()
        cli_evaluate()
    except UserError as error:
        return fail(str(error))
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return full_memory()
    except Exception as error:
        if not _of_the_command_line(error):
            raise
        return fail(f"{error}" or type(error).__name__)
    return 0


def _of_the_command_line(error: Exception) -> bool:
    """Whether the harness refused its command line, or the file of --config."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_globals.get("__name__", "") for frame in frames]
    at_once = modules[-1] == "lm_eval.evaluator" and frames[-1].f_code.co_name == "simple_evaluate"
    readers = {"lm_eval._cli.utils", "lm_eval.config.evaluate_config", "lm_eval.api.registry"}
    return at_once or not readers.isdisjoint(modules)


if __name__ == "__main__":
    sys.exit(process.ended(main()))
