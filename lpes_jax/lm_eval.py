"""EleutherAI's lm-evaluation-harness with a model and its factors: the harness's own command line, with one more --model.

Examples:
  python -m lpes_jax.lm_eval run --model lpes_jax --model_args pretrained=tiny-retriever --tasks arc_easy --batch_size auto
      a model as it is
  python -m lpes_jax.lm_eval run --model lpes_jax --model_args pretrained=DIR,factors=RUN/factors.json --tasks arc_easy
      with the factors of a search; factors=NAME takes the zoo's

The harness finds no models by itself: its `lm_eval` command knows this one only where `lpes_jax.lm_eval` was imported. Requests
are encoded, cut and stopped as the harness's own `hf` model does it, and prompts that begin alike share what they share.
Generation is greedy. With RoPE of the types `dynamic` and `longrope`, the longest request of a call decides for all.

Needs the extra `lm-eval` (lm-evaluation-harness 0.4.13 or later).
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lpes_jax.cli import fail
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.generation import generate_ids
from lpes_jax.memory import tokens_that_fit, tokens_worth_it
from lpes_jax.models.llama import load
from lpes_jax.models.llama.method import of_table
from lpes_jax.prefixes import padded, round_up
from lpes_jax.same_model import check_loaded
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
    from lm_eval.utils import get_rolling_token_windows  # pyright: ignore[reportMissingImports]
    from tqdm import tqdm
except ImportError as error:
    message = f"lpes_jax.lm_eval needs lm-evaluation-harness ({error}): pip install 'lpes-jax[lm-eval]'"
    if __name__ == "__main__":
        sys.exit(fail(message))
    raise UserError(message) from error

_CHUNK = 256  # positions of a row whose logits are in memory together
_GREEDY = ("do_sample", "temperature", "top_p", "top_k", "until", "max_gen_toks")  # what greedy generation takes or can ignore


@register_model("lpes_jax")
class LayerFactorsLM(TemplateLM):
    """A model with factors for the harness.

    pretrained: as every verb's `--model`. factors: a factors.json, or the zoo's by name; other_model=True takes those that were
    found for another model, as far as their shape fits. batch_size: requests a pass, `auto`
    (or None) by the device's memory. max_length: tokens of a request that the model sees at most (default: its window).
    add_bos_token: where the tokenizer's own habit is not wanted. max_batch_size and device, which the harness gives to every
    model, are left aside: JAX takes the device that it finds (JAX_PLATFORMS). Raises UserError as `load` and
    `LayerFactors.load` do.
    """

    def __init__(
        self,
        pretrained: str = "tiny-retriever",
        factors: str | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        batch_size: int | str | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        max_gen_toks: int = 256,
        max_batch_size: int | None = None,
        device: str | None = None,
        other_model: bool = False,
    ):
        super().__init__()
        found = None if factors is None else LayerFactors.load(factors)
        loaded = load(pretrained, dtype)
        config = loaded.model.config
        self.tokenizer: Any = loaded.tokenizer
        self.max_gen_toks, self._loaded, self._model = max_gen_toks, loaded, loaded.model
        self._factors = LayerFactors.uniform(1.0, config.num_layers) if found is None else found
        self._factors_model = None if found is None else check_loaded(found, loaded, str(factors), other_model)
        self.max_length = max_length or config.max_position_embeddings
        self._batch_size = None if batch_size is None or str(batch_size).startswith("auto") else int(batch_size)
        self._add_bos_token = add_bos_token
        prefixes = (prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        self._prefix_token_id = next((token for token in prefixes if token is not None), None)

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What the first token of a text is predicted from."""
        if self._prefix_token_id is None:
            raise UserError("the tokenizer has no begin and no end of text; give prefix_token_id in --model_args")
        return self._prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        return str(self._loaded.identity["name"]).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """Ids of a text, with the tokenizer's own special tokens unless told otherwise or where the text begins with them."""
        special = self._add_bos_token if add_special_tokens is None else add_special_tokens
        prefix = None if self._prefix_token_id is None else self.tokenizer.decode([self._prefix_token_id])
        if add_special_tokens is None and has_bos_prefix(string, prefix):
            special = False
        return self.tokenizer.encode(string, **({} if special is None else {"add_special_tokens": special}))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **ignored: Any
    ) -> list[tuple[float, bool]]:
        """(log p of the continuation, is it the greedy one) of each request: its texts, and the ids of both."""
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
            correct, log_likelihood = scorer(self._factors.factors[None], self._factors.granularity, on_prompts)
        answers = list(zip(log_likelihood[0].tolist(), (bool(it) for it in correct[0]), strict=True))
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of each whole text, cut into windows with as much context as the model takes."""
        windows, counted, request_of = [], [], []
        for at, (text,) in enumerate(request.args for request in requests):
            ids = self.tok_encode(text)
            for context, predicted in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append(context + predicted[-1:])
                counted.append(len(predicted))
                request_of.append(at)
        totals = np.zeros(len(requests))
        with _progress("loglikelihood_rolling", len(windows), disable_tqdm) as on_windows:
            for at, of_tokens in self._nlls(windows, on_windows):
                totals[request_of[at]] -= of_tokens[len(windows[at]) - counted[at] : len(windows[at])].sum(dtype=np.float64)
        for request, total in zip(requests, totals.tolist(), strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals.tolist()

    def _nlls(self, windows: list[list[int]], on_windows: Callable[[int], None]) -> list[tuple[int, np.ndarray]]:
        """The number of each window, and -log p of its tokens (and of the padding behind them)."""
        if not windows:
            return []
        width = round_up(max(map(len, windows)))
        at_once = min(tokens_that_fit(self._model, width, min(width, _CHUNK)), tokens_worth_it(self._model, width)) // width
        size = min(self._batch_size or max(1, at_once), len(windows))
        order = sorted(range(len(windows)), key=lambda at: len(windows[at]))
        nlls: list[tuple[int, np.ndarray]] = []
        for start in range(0, len(order), size):
            of_batch = order[start : start + size]
            filled = of_batch + of_batch[:1] * (size - len(of_batch))  # as large as the others: one compilation
            longest = len(windows[of_batch[-1]])
            tokens, _ = padded([windows[at] for at in filled], round_up(longest))
            table = self._model.config.rope_table(longest - 1, self._factors)
            values = np.asarray(token_nll(self._model, jnp.asarray(tokens), of_table(table), _CHUNK))
            nlls += zip(of_batch, values, strict=False)
            on_windows(len(of_batch))
        return nlls

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The greedy continuation of each context up to the first of its `until` texts, the end of text, or max_gen_toks."""
        alike: dict[str, list[int]] = {}
        for at, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(at)
        outputs = [""] * len(requests)
        with _progress("generate_until", len(requests), disable_tqdm) as on_prompts:
            for of_settings in alike.values():
                chosen = [requests[at] for at in of_settings]
                for at, text in zip(of_settings, self._generated(chosen, on_prompts), strict=True):
                    outputs[at] = text
                    self.cache_hook.add_partial("generate_until", requests[at].args, text)
        return outputs

    def _generated(self, requests: list[Any], on_prompts: Callable[[int], None]) -> list[str]:
        """Of requests with the same settings."""
        settings = normalize_gen_kwargs(requests[0].args[1], self.max_gen_toks)
        unknown = [name for name in settings if name not in _GREEDY]
        if settings["do_sample"] or unknown:
            raise UserError(f"generation is greedy here: no {(unknown or ['do_sample'])[0]}; take it out, or give --gen_kwargs")
        eos = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        until, new = handle_stop_sequences(settings["until"], eos=eos), settings["max_gen_toks"]
        room = self.max_length - new
        if room < 1:
            raise UserError(f"max_gen_toks {new} leaves no room for a prompt in the {self.max_length} tokens of the model")
        ids = generate_ids(
            self._model,
            [(self.tok_encode(request.args[0]) or [self.prefix_token_id])[-room:] for request in requests],
            factors=self._factors,
            max_new_tokens=new,
            stop=sorted({*self._loaded.stop_ids, *self._ids_with(until)}),
            keep_stop=True,
            batch_size=self._batch_size,
            on_prompts=on_prompts,
        )
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [postprocess_generated_text(text, until, think_end_token=None) for text in texts]

    def _ids_with(self, until: Sequence[str]) -> list[int]:
        """Ids whose text has one of these in it: nothing behind them is read. Texts of several tokens stop nothing early."""
        before = self.tokenizer.encode("a", add_special_tokens=False)  # the first token of a text may lose its space
        texts = self.tokenizer.batch_decode([[*before, at] for at in range(len(self.tokenizer))])
        start = len(self.tokenizer.decode(before))
        return [at for at, text in enumerate(texts) if any(end and end in text[start:] for end in until)]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt that the tokenizer's template makes of a chat; without its system part, where the template refuses one."""
        how: dict[str, Any] = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return str(self.tokenizer.apply_chat_template(chat_history, **how))
        except TemplateError:
            without = [message for message in chat_history if message["role"] != "system"]
            return str(self.tokenizer.apply_chat_template(without, **how))

    def get_model_info(self) -> dict[str, Any]:
        """What the harness's results say of the model."""
        identity = self._loaded.identity
        return {
            "model_num_parameters": sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self._model))),
            "model_dtype": identity["dtype"],
            "model_sha": identity["sha256"],
            "lpes_factors": self._factors.numbers,
            "lpes_factors_model": self._factors_model,
        }


@contextmanager
def _progress(kind: str, total: int, disable: bool) -> Iterator[Callable[[int], None]]:
    """The harness's own bar; what it gives is told how much was done."""
    with tqdm(total=total, disable=disable, desc=f"Running {kind} requests") as bar:

        def done(count: int) -> None:
            bar.update(count)

        yield done


def main() -> int:
    """The harness's command line; returns the exit code."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    try:
        cli_evaluate()
    except UserError as error:
        return fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
