"""The training prompts of the small Llama that the project bundles: its tokenizer and random rows in the key-value template.

Rows are made on the device: the template's fixed token ids with random hexadecimal digits between them. A row is a JSON object
followed by one or several questions with their answers:

    <begin>Extract the value ... JSON data:
    {"4c03...": "81d2...",
     "e81f...": "09ab..."}

    Key: "e81f..."
    Corresponding value: "09ab..."<end of text>

`Conditions` say how many pairs it has and which of them are asked for.

Letters: B rows, T tokens, M the most pairs in a row, N the longest key in characters, Q questions in a row.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from lpes_jax.tasks.key_value import TEMPLATE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END, BEGIN = "<|endoftext|>", "<|begin|>"
# Whole tokens. None consists only of hexadecimal digits, and none joins the end of a prompt with the beginning of an answer.
PIECES = (
    *("Extract", " the", " value", " corresponding", " to", " specified", " key", " in", " JSON", " object", " below", " data"),
    *("JSON", "Key", "Corresponding", "\n\n", '{"', '": "', '",\n "', '"}', ' "'),
)


def make_tokenizer() -> "PreTrainedTokenizerFast":
    """A tokenizer with `PIECES` as whole tokens and a token for each other byte; it adds one `BEGIN` before a text."""
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [byte_level.pre_tokenize_str(piece)[0][0] for piece in PIECES]
    tokens = [END, BEGIN, *sorted(pre_tokenizers.ByteLevel.alphabet()), *pieces]
    # No merges: a piece that the split below cuts out is in the vocabulary, and everything else becomes bytes.
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], ignore_merges=True))
    longest_first = sorted(PIECES, key=len, reverse=True)
    split = Regex("|".join(map(re.escape, longest_first)) + r"|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(split, "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN}:0 $A:0", pair=f"{BEGIN}:0 $A:0 $B:1", special_tokens=[(BEGIN, tokens.index(BEGIN))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,  # so that decoding returns the text
    )


@dataclass(frozen=True)
class Template:
    """Token ids of the fixed parts of a prompt, in order: `head key between value (next key between value)* close question
    key answer value quote (question ...)* end`; and those of the sixteen digits."""

    head: tuple[int, ...]
    between: int
    next: int
    close: int
    question: tuple[int, ...]
    answer: tuple[int, ...]
    quote: int
    end: int
    digits: tuple[int, ...]


def make_template(tokenizer: "PreTrainedTokenizerFast") -> Template:
    """The template of the task's own prompt and its opener ` "`."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    before, after = (part.replace("{{", "{").replace("}}", "}") for part in TEMPLATE.split("{records}"))
    question, answer = after.removeprefix("}").split("{key}")
    (between,), (following,), (close,), (quote,) = ids('": "'), ids('",\n "'), ids('"}'), ids('"')
    (begin,), (end,) = ids(BEGIN), ids(END)
    return Template(
        head=(begin, *ids(before + '"')),
        between=between,
        next=following,
        close=close,
        question=ids(question),
        answer=ids(answer + ' "'),
        quote=quote,
        end=end,
        digits=ids("0123456789abcdef"),
    )


class Shape(NamedTuple):
    """The sizes of a compiled program: rows, and the most pairs, characters of a key and questions in a row."""

    rows: int
    pairs: int
    key_length: int
    questions: int

    def tokens(self, template: Template) -> int:
        """Tokens of the longest row, rounded up to a multiple of 64."""
        length = len(template.head) + self.pairs * (2 * self.key_length + 2) + 1
        length += self.questions * (len(template.question) + len(template.answer) + 2 * self.key_length + 1)
        return -(-length // 64) * 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Content:
    """The random part of rows: pairs, characters of a key, the slots asked for, the digits of all keys and values, and which
    pairs are repetitions."""

    pairs: Int[Array, "B"]
    key_length: Int[Array, "B"]
    slots: Int[Array, "B Q"]
    digits: Int[Array, "B M 2 N"]
    repeats: Bool[Array, "B M"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Conditions:
    """The distribution of `Content`; ranges include both ends. With `distinct`, a row repeats that many different pairs."""

    pairs: tuple[int, int]
    key_length: tuple[int, int]
    edge_share: float
    edge_width: float
    end_share: float
    distinct: int = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Token ids; which tokens are digits of a repeated key, digits of its value, the close of an answer, and other fixed
    tokens; the question of each token (-1: none)."""

    tokens: Int[Array, "B T"]
    is_key: Bool[Array, "B T"]
    is_value: Bool[Array, "B T"]
    is_close: Bool[Array, "B T"]
    is_fixed: Bool[Array, "B T"]
    question: Int[Array, "B T"]


def draw_slots(key: Array, pairs: Int[Array, "B"], questions: int, conditions: Conditions) -> Int[Array, "B Q"]:
    """With probability `edge_share`, one of the first or last `edge_width` of the pairs (at least one), else any pair."""
    at_edge, at_end, where = jax.random.uniform(key, (3, len(pairs), questions))
    count = pairs[:, None].astype(jnp.float32)
    edge = jnp.maximum(jnp.round(conditions.edge_width * count), 1.0)
    near = jnp.floor(where * edge)
    near = jnp.where(at_end < conditions.end_share, count - 1 - near, near)
    slots = jnp.where(at_edge < conditions.edge_share, near, jnp.floor(where * count))
    return jnp.clip(slots.astype(jnp.int32), 0, pairs[:, None] - 1)


def draw_content(key: Array, shape: Shape, conditions: Conditions) -> Content:
    """Random rows: all independent, with numbers of pairs and key lengths uniform in their ranges."""
    for_pairs, for_length, for_slots, for_digits, for_repeats = jax.random.split(key, 5)
    (fewest, most), (shortest, longest) = conditions.pairs, conditions.key_length
    pairs = jax.random.randint(for_pairs, (shape.rows,), fewest, most + 1)
    digits = jax.random.randint(for_digits, (shape.rows, shape.pairs, 2, shape.key_length), 0, 16)
    few = jax.random.randint(for_repeats, (shape.rows, shape.pairs), 0, jnp.clip(conditions.distinct, 1, shape.pairs))
    which = jnp.where(jnp.asarray(conditions.distinct) > 0, few, jnp.arange(shape.pairs)[None, :])
    before = jnp.tri(shape.pairs, k=-1, dtype=bool)[None]
    return Content(
        pairs,
        jax.random.randint(for_length, (shape.rows,), shortest, longest + 1),
        draw_slots(for_slots, pairs, shape.questions, conditions),
        jnp.take_along_axis(digits, which[:, :, None, None], axis=1),
        ((which[:, :, None] == which[:, None, :]) & before).any(axis=2),
    )


def assemble(template: Template, shape: Shape, content: Content) -> Rows:
    """The prompts and answers of `content`, padded on the right with the end of text.

    A row with one question has exactly the ids that the tokenizer gives for the task's prompt, value, closing quote and end.
    """
    head, asks, answers = len(template.head), len(template.question), len(template.answer)
    pairs, length = content.pairs[:, None], content.key_length[:, None]
    positions = jnp.arange(shape.tokens(template))[None, :]
    record, in_record = jnp.divmod(positions - head, 2 * length + 2)
    behind = positions - head - pairs * (2 * length + 2)  # tokens since the JSON object ended
    question, in_question = jnp.divmod(behind, asks + answers + 2 * length + 1)
    asked = (question >= 0) & (question < shape.questions)
    in_value = in_question - asks - length - answers

    is_record = (positions >= head) & (behind < 0)
    is_key = asked & (in_question >= asks) & (in_question < asks + length)
    is_value = asked & (in_value >= 0) & (in_value < length)
    is_quote = asked & (in_value == length)
    is_end = (question == shape.questions) & (in_question == 0)

    # The digit of each token: of which pair, of its key or value, and its index.
    slot = jnp.take_along_axis(content.slots, jnp.clip(question, 0, shape.questions - 1), axis=1)
    pair = jnp.where(asked, slot, jnp.clip(record, 0, shape.pairs - 1))
    value_part = jnp.where(asked, is_value, in_record > length).astype(jnp.int32)
    which = jnp.where(asked, jnp.where(is_value, in_value, in_question - asks), in_record - value_part * (length + 1))
    which = jnp.clip(which, 0, shape.key_length - 1)
    flat = content.digits.reshape(shape.rows, -1)
    digit = jnp.take_along_axis(flat, (2 * pair + value_part) * shape.key_length + which, axis=1)

    def fixed(ids: tuple[int, ...], index: Array) -> Array:
        return jnp.asarray(ids, jnp.int32)[jnp.clip(index, 0, len(ids) - 1)]

    is_digit = is_key | is_value | (is_record & (in_record != length) & (in_record != 2 * length + 1))
    again = is_record & jnp.take_along_axis(content.repeats, pair, axis=1)
    is_fixed = (positions > 0) & ~is_digit & ((behind < 0) | asked)

    tokens = jnp.select(
        [
            positions < head,
            is_record & (in_record == length),
            is_record & (in_record == 2 * length + 1) & (record < pairs - 1),
            is_record & (in_record == 2 * length + 1),
            is_digit,
            asked & (in_question < asks),
            asked & (in_value < 0),
            is_quote,
        ],
        [
            fixed(template.head, positions),
            jnp.int32(template.between),
            jnp.int32(template.next),
            jnp.int32(template.close),
            fixed(template.digits, digit),
            fixed(template.question, in_question),
            fixed(template.answer, in_value + answers),
            jnp.int32(template.quote),
        ],
        jnp.int32(template.end),
    )
    is_key |= again & (in_record < length)
    is_value |= again & (in_record > length) & (in_record <= 2 * length)
    return Rows(tokens, is_key, is_value, is_quote | is_end, is_fixed & ~is_quote, jnp.where(asked, question, -1))
