"""The expected answers of an exported folder or file, as JSON: prompts, and log-probabilities with and without its factors.

The prompts are questions about key-value pairs, of several lengths up to the longest of the search, with the fact at several
positions. Each has the log-probabilities of next tokens at points along the prompt and its answer. A server near `log_probs`
has the factors; a server near `plain_log_probs` runs the model without them. A single short text would not show the difference.

Letters: T tokens, N points, C candidates at a point, V vocabulary.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lpes_jax.factors import LayerFactors
from lpes_jax.finite import not_finite
from lpes_jax.generation import generate_ids
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama, hidden_states, output_logits
from lpes_jax.rope import RopeTable
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.prompts import slot, token_ids

FORMAT, FILE = "lpes-self-test/1", "self_test.json"
SCRIPT = Path(__file__).parent / "check_in_transformers.py"
TOLERANCE = 1e-2  # nats, float32 in another library
_TELLS = 10  # a model without factors is detected if it is off by this many tolerances somewhere
_SHARES = ((1.0, 0), (1.0, 75), (0.5, 50), (0.25, 25), (0.125, 100))  # share of the longest prompt, position of the fact in %
_DEFAULT_LONGEST = 1024  # tokens, if the factors do not say how long their prompts were
_MOST_PAIRS = 2**14  # no model has longer prompts
_POINTS, _CANDIDATES, _NEW = 6, 5, 8
_ABOUT = (
    "log-probabilities (nats) by lpes_jax in float32: at each point, of the token ids `ids` after the first `tokens` of the "
    "prompt's ids; log_probs with the factors, plain_log_probs without them. A server in 16 bits is off by some hundredths, "
    "and one that rounds activations to 8 bits by some tenths; it has the factors if it is nearer to log_probs"
)


@dataclass(frozen=True)
class _Question:
    text: str
    ids: list[int]  # the text and the answer
    position: int
    points: list[int]  # numbers of ids before each point


def write_self_test(
    folder: Path, written: Llama, factors: LayerFactors | None, original: Llama, all_factors: LayerFactors, tokenizer: Any
) -> list[str]:
    """Write self_test.json. Returns lines to print.

    Args:
        folder: The exported folder.
        written: The model of the written files, in float32.
        factors: The factors that are not in its weights and RoPE; None if there are none.
        original: The model without factors.
        all_factors: All factors.
        tokenizer: The tokenizer.

    Raises:
        UserError: Log-probabilities are not finite.
    """
    questions = _questions(tokenizer, original.config, longest_searched(all_factors, tokenizer))
    found = [_log_probs(written, factors, question) for question in questions]
    plain = [_log_probs(original, None, question) for question in questions]
    exact = [_log_probs(original, all_factors, question) for question in questions]
    best = [np.argsort(-rows, axis=-1)[:, :_CANDIDATES] for rows in found]

    def at_best(log_probs: Sequence[Float[np.ndarray, "N V"]]) -> list[Float[np.ndarray, "N C"]]:
        return [np.take_along_axis(rows, ids, axis=-1) for rows, ids in zip(log_probs, best, strict=True)]

    found, plain, exact = at_best(found), at_best(plain), at_best(exact)
    off = np.concatenate([np.abs(ours - theirs).ravel() for ours, theirs in zip(plain, found, strict=True)])
    rounding = np.concatenate([np.abs(ours - theirs).ravel() for ours, theirs in zip(exact, found, strict=True)])
    notices = bool(off.max() >= _TELLS * TOLERANCE)
    short = questions[-1].ids[: max(1, _window(original.config) - _NEW)]
    new = generate_ids(written, [short], factors=factors, max_new_tokens=_NEW)[0]
    record = {
        "format": FORMAT,
        "about": _ABOUT,
        "tolerance": TOLERANCE,
        "plain_is_off_by": {"mean": float(off.mean()), "most": float(off.max())},
        "notices_a_plain_model": notices,
        "rounding": {"mean": float(rounding.mean()), "most": float(rounding.max())},
        "prompts": [
            {
                "text": question.text,
                "fact_at_percent": question.position,
                "ids": question.ids,
                "points": [
                    {"tokens": tokens, "ids": ids, "log_probs": log_probs, "plain_log_probs": plain_log_probs}
                    for tokens, ids, log_probs, plain_log_probs in zip(
                        question.points, ids.tolist(), found_rows.tolist(), plain_rows.tolist(), strict=True
                    )
                ],
            }
            for question, ids, found_rows, plain_rows in zip(questions, best, found, plain, strict=True)
        ],
        "greedy": {"ids": short, "new_ids": new},
    }
    (folder / FILE).write_text(json.dumps(record) + "\n", encoding="utf-8")
    lengths = sorted(len(question.ids) for question in questions)
    lines = [
        f"self-test: {len(questions)} prompts of {lengths[0]} to {lengths[-1]} tokens; log-probabilities are off by "
        f"{off.max():.2g} nats at most without the factors ({off.mean():.2g} on average), and by {rounding.max():.2g} "
        f"({rounding.mean():.2g}) by the rounding of the weights"
    ]
    if not notices:
        lines.append(
            f"warning: these factors change so little that the self-test, which allows {TOLERANCE:g} nats, cannot tell the "
            "model from one without them"
        )
    return lines


def write_script(folder: Path) -> list[str]:
    """Write the program that compares transformers with self_test.json into the folder. Returns lines to print."""
    shutil.copyfile(SCRIPT, folder / "self_test.py")
    return ["to try it with torch and transformers: python {out}/self_test.py"]


def longest_searched(factors: LayerFactors, tokenizer: Any) -> int:
    """The tokens of the longest search prompt with its answer.

    A search records this number. For older files, it is computed from the largest number of key-value pairs in their record,
    also in a range or a mixture. Without key-value pairs it is a default.
    """
    search = factors.search
    if isinstance(tokens := search.get("longest_tokens"), int) and tokens > 0:
        return tokens
    mixture = search.get("mixture")
    parts = [part for part in mixture.values() if isinstance(part, dict)] if isinstance(mixture, dict) else []
    pairs = [number for part in (search, *parts) for number in _numbers(part.get("num_pairs"))]
    if not pairs or not 0 < max(pairs) <= _MOST_PAIRS:
        return _DEFAULT_LONGEST
    return len(_prompt(tokenizer, max(pairs), 0)[1])


def _numbers(lengths: Any) -> list[int]:
    """The whole numbers in lengths as files have them: 20, [5, 10, 20], "5:20"."""
    if isinstance(lengths, list):
        return [number for length in lengths for number in _numbers(length)]
    if isinstance(lengths, str):
        return [int(number) for number in lengths.split(":") if number.isdecimal()]
    return [lengths] if isinstance(lengths, int) and not isinstance(lengths, bool) else []


def _questions(tokenizer: Any, config: LlamaConfig, longest: int) -> list[_Question]:
    longest = min(longest, config.max_position_embeddings)
    one_pair, ten_pairs = (len(_prompt(tokenizer, pairs, 0)[1]) for pairs in (1, 10))
    questions = []
    for share, position in _SHARES:
        tokens = max(2, int(longest * share))
        pairs = max(1, 1 + int(9 * (tokens - one_pair) / max(1, ten_pairs - one_pair)))
        text, ids, text_tokens = _prompt(tokenizer, pairs, position)
        while len(ids) > tokens and pairs > 1:
            pairs -= 1
            text, ids, text_tokens = _prompt(tokenizer, pairs, position)
        ids = ids[:tokens]  # if the window has no room for one pair
        along = np.linspace(1, len(ids) - 1, _POINTS).astype(int).tolist()
        answer = range(min(text_tokens, len(ids) - 1), len(ids))
        questions.append(_Question(text, ids, position, sorted({*along, *answer})))
    return questions


def _prompt(tokenizer: Any, pairs: int, position: int) -> tuple[str, list[int], int]:
    """A prompt's text, the ids of text and answer, and the number of ids of the text."""
    task = KeyValue(pairs)
    prompt = task.prompt(task.examples("test", 1, 0)[0], slot(position, pairs))
    text, whole = token_ids(tokenizer, [prompt.text, prompt.text + prompt.answers[0]])
    return prompt.text, whole, min(len(text), len(whole) - 1)


def _window(config: LlamaConfig) -> int:
    """The length up to which frequencies do not depend on the length of a text, so that a text may grow."""
    return min(config.rope.original_max_position_embeddings or config.max_position_embeddings, config.max_position_embeddings)


def _log_probs(model: Llama, factors: LayerFactors | None, question: _Question) -> Float[np.ndarray, "N V"]:
    table = model.config.rope_table(len(question.ids), factors)
    logits = _logits(model, jnp.array([question.ids], jnp.int32), table, jnp.array(question.points, jnp.int32) - 1)
    found = np.asarray(jax.nn.log_softmax(logits))
    if not np.isfinite(found).all():
        raise not_finite(model, [question.ids], factors)
    return found


@jax.jit
def _logits(model: Llama, tokens: Int[Array, "B T"], table: RopeTable, read: Int[Array, "N"]) -> Float[Array, "N V"]:
    return output_logits(model, hidden_states(model, tokens, table)[0, read])
