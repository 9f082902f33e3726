"""Train the small Llama that the project bundles: key-value retrieval with short hexadecimal keys, in the task's own template.

    python experiments/train_tiny_model.py --output runs/tiny                       # one GPU, minutes
    python experiments/train_tiny_model.py --output runs/tiny --steps 600 --num-layers 3 --hidden-size 64 ...   # a CPU

Prompts are made on the device: the template's fixed token ids with random hexadecimal digits between them, so no two batches
are alike and none comes from the generator of `lpes_jax.tasks.key_value`, which makes the questions of every measurement.

Where the position bias comes from. The model is never trained on what it is measured on: a gold pair is asked for mostly
near one of the ends of the prompt (`--edge-share`, `--edge-width`), as facts stand in natural text, and most prompts are
shorter (`--train-pairs`) than those that the model is measured on (`--test-pairs`); a share of them is long (`--long-share`,
`--long-pairs`, `--long-edge-share`). RoPE is the same in training, in the saved folder and in the measurement.

Training has two parts. Stages, each of which lasts until `--stage-accuracy` of the values are right in whole: first JSON
objects in which a few pairs stand again and again (`--repeat-pairs`, `--repeat-distinct`; the loss is on the repetitions,
too), then few pairs, once each (`--stage-pairs`); gold is anywhere (`--stage-edge-share`), and several questions stand behind
one JSON object. Then the mixture above with one question a prompt, to the end. The loss counts each value, the quote behind
it and the end of text; the digits of a key asked for count `--key-weight`, because to continue a key that was seen is half of
what retrieval needs, and the fixed tokens count `--template-weight`.

The folder gets config.json, model.safetensors (bfloat16), the tokenizer's files, training.json (flags, versions, seconds, the
course of the loss) and evaluation.json: accuracy by position for several prompt lengths, a sweep of one uniform factor, and
factors with one step (1 up to a layer, another number behind it), all on questions of the split `search`.

Letters: B rows, T tokens, M the most pairs in a row, N the longest key in characters, Q questions in a row, V vocabulary.
"""

import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from lpes_jax.errors import UserError
from lpes_jax.evaluation import environment
from lpes_jax.models.llama import Llama, LlamaConfig, load
from lpes_jax.models.llama.attention import causal_attention
from lpes_jax.models.llama.checkpoint import save_llama
from lpes_jax.models.llama.model import decoder_layer, matmul, output_logits, rms_norm
from lpes_jax.rope import RopeParameters, rope_table
from lpes_jax.scoring import Scorer
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.key_value import TEMPLATE, KeyValue

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

POSITIONS = (0, 25, 50, 75, 100)
END, BEGIN = "<|endoftext|>", "<|begin|>"
# Whole tokens. None is made of hexadecimal digits alone, and none joins the end of a prompt with the begin of an answer.
PIECES = (
    *("Extract", " the", " value", " corresponding", " to", " specified", " key", " in", " JSON", " object", " below", " data"),
    *("JSON", "Key", "Corresponding", "\n\n", '{"', '": "', '",\n "', '"}', ' "'),
)


@dataclass(frozen=True)
class Settings:
    """What to train, on what, and how."""

    output: Path
    """Folder for the model and its records."""
    seed: int = 0

    key_length: int = 8
    """Hexadecimal characters of a key and of a value."""
    test_pairs: int = 32
    """Pairs in the prompts that the model is meant to be measured on: watched during training, swept at the end."""

    train_pairs: tuple[int, int] = (4, 24)
    """Fewest and most pairs of the short training prompts."""
    edge_share: float = 0.9
    """Share of questions about a pair near an end; the others are about any pair."""
    edge_width: float = 0.15
    """How much of the pairs is near an end, at each end."""
    end_share: float = 0.5
    """Of the questions near an end: how many at the last pairs, and not at the first."""
    long_share: float = 0.1
    """Share of training steps on long prompts."""
    long_pairs: tuple[int, int] = (25, 34)
    """Fewest and most pairs of the long training prompts."""
    long_edge_share: float = 0.9
    """`edge_share` of the long prompts."""

    repeat_pairs: int = 12
    """Most pairs in the first stage, which draws all pairs of a prompt from few; 0: no such stage."""
    repeat_distinct: int = 3
    """How many those few are."""
    stage_pairs: tuple[int, ...] = (4, 10)
    """Most pairs (at least 2) in each of the stages that follow."""
    stage_edge_share: float = 0.0
    """`edge_share` of the stages."""
    stage_questions: int = 4
    """Questions behind one JSON object in the stages."""
    stage_shortest_key: int = 4
    """Keys of the stages have this many characters up to `key_length`."""
    stage_accuracy: float = 0.9
    """A stage ends when this share of the values of a report is right in whole."""
    stage_limit: float = 0.6
    """The stages end at this share of the training at the latest."""

    num_layers: int = 10
    hidden_size: int = 192
    intermediate_size: int = 512
    num_heads: int = 6
    num_kv_heads: int = 3
    head_dim: int = 32
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048

    steps: int = 8000
    """Optimiser steps, in whole reports; the learning rate falls along a cosine over them."""
    max_seconds: float = 0.0
    """Training ends after this many seconds at the latest, the cosine with it; 0: no limit."""
    batch_tokens: int = 32_768
    """Tokens of a step."""
    learning_rate: float = 1e-3
    warmup_steps: int = 200
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    key_weight: float = 0.25
    """Weight of the digits of a key that was seen before in the loss."""
    template_weight: float = 0.05
    """Weight of the fixed tokens in the loss."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the forward and backward pass (auto: bfloat16 on a GPU, float32 elsewhere); the trained weights are float32."""
    report_steps: int = 50
    """Steps of one call of the device and one line of the record."""
    check_reports: int = 10
    """Reports between two looks at the accuracy by position."""
    check_rows: int = 64
    """Prompts for each position of such a look."""

    eval_pairs: tuple[int, ...] = (8, 16, 24, 32, 40, 48)
    """Pairs in the prompts of the measurement at the end."""
    eval_examples: int = 200
    """Examples of it, each at the five positions."""
    eval_seed: int = 4321
    sweep: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)
    """Uniform factors at `test_pairs`."""
    probe: tuple[float, ...] = (0.75, 1.25, 1.5, 2.0, 3.0)
    """Factors behind the step of the one-step profiles at `test_pairs`."""
    probe_examples: int = 100


# The tokenizer and the prompts


def make_tokenizer() -> "PreTrainedTokenizerFast":
    """`PIECES` as whole tokens, each other byte a token of its own; one `BEGIN` in front."""
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [byte_level.pre_tokenize_str(piece)[0][0] for piece in PIECES]
    tokens = [END, BEGIN, *sorted(pre_tokenizers.ByteLevel.alphabet()), *pieces]
    # No merges: a piece that the split below cuts out is in the vocabulary as it is, all else falls into bytes.
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
        clean_up_tokenization_spaces=False,  # decoding gives back the text
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
    """Of the task's own template and its opener ` "`."""

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
    """What a compiled program is for: rows, and the most pairs, characters of a key and questions in a row."""

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
    """What is random in rows: pairs, characters of a key, the slots asked for, the digits of all keys and values, and which
    pairs stood there before."""

    pairs: Int[Array, "B"]
    key_length: Int[Array, "B"]
    slots: Int[Array, "B Q"]
    digits: Int[Array, "B M 2 N"]
    repeats: Bool[Array, "B M"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Conditions:
    """Where `Content` is drawn from; both ends of a range are in it. With `distinct`, so many pairs make all of a row's."""

    pairs: tuple[int, int]
    key_length: tuple[int, int]
    edge_share: float
    edge_width: float
    end_share: float
    distinct: int = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Token ids; which tokens are digits of a key that stood there before, digits of its value, what closes an answer, and
    other fixed tokens; the question each token belongs to (-1: none)."""

    tokens: Int[Array, "B T"]
    is_key: Bool[Array, "B T"]
    is_value: Bool[Array, "B T"]
    is_close: Bool[Array, "B T"]
    is_fixed: Bool[Array, "B T"]
    question: Int[Array, "B T"]


def draw_slots(key: Array, pairs: Int[Array, "B"], questions: int, conditions: Conditions) -> Int[Array, "B Q"]:
    """With probability `edge_share` one of the first or last `edge_width` of the pairs (at least one), else any pair."""
    at_edge, at_end, where = jax.random.uniform(key, (3, len(pairs), questions))
    count = pairs[:, None].astype(jnp.float32)
    edge = jnp.maximum(jnp.round(conditions.edge_width * count), 1.0)
    near = jnp.floor(where * edge)
    near = jnp.where(at_end < conditions.end_share, count - 1 - near, near)
    slots = jnp.where(at_edge < conditions.edge_share, near, jnp.floor(where * count))
    return jnp.clip(slots.astype(jnp.int32), 0, pairs[:, None] - 1)


def draw_content(key: Array, shape: Shape, conditions: Conditions) -> Content:
    """Random rows: everything independent, numbers of pairs and key lengths uniform in their ranges."""
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
    """The prompts and answers of `content`, filled up on the right with the end of text.

    A row with one question has exactly the ids that the tokenizer gives for the task's prompt, value, closing quote and end.
    """
    head, asks, answers = len(template.head), len(template.question), len(template.answer)
    pairs, length = content.pairs[:, None], content.key_length[:, None]
    at = jnp.arange(shape.tokens(template))[None, :]
    record, in_record = jnp.divmod(at - head, 2 * length + 2)
    behind = at - head - pairs * (2 * length + 2)  # tokens since the JSON object ended
    question, in_question = jnp.divmod(behind, asks + answers + 2 * length + 1)
    asked = (question >= 0) & (question < shape.questions)
    in_value = in_question - asks - length - answers

    is_record = (at >= head) & (behind < 0)
    is_key = asked & (in_question >= asks) & (in_question < asks + length)
    is_value = asked & (in_value >= 0) & (in_value < length)
    is_quote = asked & (in_value == length)
    is_end = (question == shape.questions) & (in_question == 0)

    # The digit at each token: which pair's, of its key or its value, and which one of them.
    slot = jnp.take_along_axis(content.slots, jnp.clip(question, 0, shape.questions - 1), axis=1)
    pair = jnp.where(asked, slot, jnp.clip(record, 0, shape.pairs - 1))
    of_value = jnp.where(asked, is_value, in_record > length).astype(jnp.int32)
    which = jnp.where(asked, jnp.where(is_value, in_value, in_question - asks), in_record - of_value * (length + 1))
    which = jnp.clip(which, 0, shape.key_length - 1)
    flat = content.digits.reshape(shape.rows, -1)
    digit = jnp.take_along_axis(flat, (2 * pair + of_value) * shape.key_length + which, axis=1)

    def fixed(ids: tuple[int, ...], index: Array) -> Array:
        return jnp.asarray(ids, jnp.int32)[jnp.clip(index, 0, len(ids) - 1)]

    is_digit = is_key | is_value | (is_record & (in_record != length) & (in_record != 2 * length + 1))
    again = is_record & jnp.take_along_axis(content.repeats, pair, axis=1)
    is_fixed = (at > 0) & ~is_digit & ((behind < 0) | asked)

    tokens = jnp.select(
        [
            at < head,
            is_record & (in_record == length),
            is_record & (in_record == 2 * length + 1) & (record < pairs - 1),
            is_record & (in_record == 2 * length + 1),
            is_digit,
            asked & (in_question < asks),
            asked & (in_value < 0),
            is_quote,
        ],
        [
            fixed(template.head, at),
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


# The model and its training


def make_config(settings: Settings, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=-(-vocabulary // 32) * 32,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=settings.max_position_embeddings,
        rope=RopeParameters(rope_theta=settings.rope_theta),
        tie_word_embeddings=True,
    )


def initial_model(config: LlamaConfig, seed: int) -> Llama:
    """float32; weights of variance 1 / inputs, what is added to the residual stream divided by sqrt(2 L) besides."""

    def scaled(path: tuple[Any, ...], leaf: Array) -> Array:
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            return leaf
        inputs = config.hidden_size if "embed" in name else leaf.shape[-2]
        depth = 2 * config.num_layers if "output" in name or "down" in name else 1
        return leaf / 0.02 / math.sqrt(inputs * depth)  # `Llama` draws from a normal distribution of 0.02

    return jax.tree_util.tree_map_with_path(scaled, Llama(config, rngs=nnx.Rngs(seed), dtype=jnp.float32))


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW without its learning rate, which is an argument of each step."""

    def decays(model: Llama) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), model)

    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(settings.weight_decay, decays),
    )


def token_logits(model: Llama, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T V"]:
    """The model's logits with its weights rounded to `dtype`.

    `hidden_states`, but for the embedding, which is a product with one-hot rows: the gradient of a lookup adds up thousands
    of rows for each digit, in 16 bits.
    """
    config = model.config
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), model)
    table = rope_table(config.rope, config.head_dim, config.num_layers)
    positions = jnp.arange(tokens.shape[1])

    def layer(x: Array, layer_and_row: tuple[Any, Array]) -> tuple[Array, None]:
        x, _ = decoder_layer(config, *layer_and_row, table.attention_scaling, x, positions, causal_attention)
        return x, None

    x = matmul(jax.nn.one_hot(tokens, config.vocab_size, dtype=dtype), narrow.embed[...])
    x, _ = jax.lax.scan(layer, x, (narrow.layers, table.inv_freq))
    return output_logits(narrow, rms_norm(x, narrow.norm[...], config.rms_norm_eps))


def predict(model: Llama, rows: Rows, dtype: Any) -> tuple[Float[Array, "B T"], Array]:
    """At every token but a row's first: the loss of its prediction in nats, and whether it is the most likely token."""
    logits = token_logits(model, rows.tokens, dtype)[:, :-1]
    wanted = rows.tokens[:, 1:]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
    ahead = ((0, 0), (1, 0))
    return jnp.pad(loss, ahead), jnp.pad(jnp.argmax(logits, axis=-1) == wanted, ahead)


def whole_values(rows: Rows, right: Array, questions: int) -> Array:
    """[B, Q]: all digits of the value are right."""
    wrong = rows.is_value & ~right
    return jnp.stack([~(wrong & (rows.question == question)).any(axis=1) for question in range(questions)], axis=1)


def batch_loss(
    model: Llama, rows: Rows, questions: int, key_weight: float, template_weight: float, dtype: Any
) -> tuple[Array, tuple[Array, Array]]:
    """The weighted mean loss; that of the values alone, and the share of values that are right in whole."""
    loss, right = predict(model, rows, dtype)
    weights = (rows.is_value | rows.is_close) + key_weight * rows.is_key + template_weight * rows.is_fixed
    value_loss = jnp.mean(loss, where=rows.is_value)
    return (loss * weights).sum() / weights.sum(), (value_loss, whole_values(rows, right, questions).mean())


@partial(jax.jit, static_argnames=("template", "shape", "settings", "dtype"), donate_argnames=("model", "moments"))
def train_steps(
    model: Llama,
    moments: optax.OptState,
    key: Array,
    learning_rates: Float[Array, "steps"],
    conditions: Conditions,
    template: Template,
    shape: Shape,
    settings: Settings,
    dtype: str,
) -> tuple[Llama, optax.OptState, tuple[Array, Array, Array]]:
    """One optimiser step a learning rate, on fresh rows; the loss, the values' loss and their whole accuracy of each."""
    optimizer = make_optimizer(settings)

    def step(carry: tuple[Any, optax.OptState], now: tuple[Array, Array]) -> tuple[Any, tuple[Array, Array, Array]]:
        model, moments = carry
        key, learning_rate = now
        rows = assemble(template, shape, draw_content(key, shape, conditions))
        gradient = jax.value_and_grad(batch_loss, has_aux=True)
        weights = settings.key_weight, settings.template_weight
        (loss, (value_loss, accuracy)), grads = gradient(model, rows, shape.questions, *weights, dtype)
        updates, moments = optimizer.update(grads, moments, model)
        model = jax.tree.map(lambda leaf, update: leaf - learning_rate * update, model, updates)
        return (model, moments), (loss, value_loss, accuracy)

    keys = jax.random.split(key, len(learning_rates))
    (model, moments), figures = jax.lax.scan(step, (model, moments), (keys, learning_rates))
    return model, moments, figures


@partial(jax.jit, static_argnames=("template", "shape", "dtype"))
def accuracy_by_position(model: Llama, key: Array, template: Template, shape: Shape, dtype: str) -> Float[Array, "5"]:
    """At `POSITIONS`, rows with all of the shape's pairs."""
    everywhere = Conditions((shape.pairs, shape.pairs), (shape.key_length, shape.key_length), 0.0, 0.0, 0.0)
    content = draw_content(key, shape, everywhere)
    slots = jnp.array([task_prompts.slot(position, shape.pairs) for position in POSITIONS], jnp.int32)
    slots = jnp.repeat(slots, shape.rows // len(POSITIONS))[:, None]
    rows = assemble(template, shape, dataclasses.replace(content, slots=slots))
    _, right = predict(model, rows, dtype)
    return whole_values(rows, right, 1).reshape(len(POSITIONS), -1).mean(axis=1)


def conditions_and_shapes(settings: Settings, template: Template) -> Iterator[tuple[str, Conditions, Shape]]:
    """Of the stages in their order, then of the short and the long prompts."""
    s = settings

    def shaped(
        pairs: tuple[int, int], shortest_key: int, edge_share: float, questions: int, distinct: int = 0
    ) -> tuple[Conditions, Shape]:
        shape = Shape(1, pairs[1], s.key_length, questions)
        rows = max(1, s.batch_tokens // shape.tokens(template))
        conditions = Conditions(pairs, (shortest_key, s.key_length), edge_share, s.edge_width, s.end_share, distinct)
        return conditions, shape._replace(rows=rows)

    shortest_key = min(s.stage_shortest_key, s.key_length)
    if s.repeat_pairs:
        yield "repeats", *shaped((2, s.repeat_pairs), shortest_key, 0.0, s.stage_questions, s.repeat_distinct)
    for most in s.stage_pairs:
        yield f"stage {most}", *shaped((2, most), shortest_key, s.stage_edge_share, s.stage_questions)
    yield "short", *shaped(s.train_pairs, s.key_length, s.edge_share, 1)
    yield "long", *shaped(s.long_pairs, s.key_length, s.long_edge_share, 1)


def check(settings: Settings, template: Template) -> None:
    """Raise UserError for what cannot be."""
    s = settings
    if s.output.exists() and any(s.output.iterdir()):
        raise UserError(f"--output {s.output}: the folder is not empty; name another one")
    if min(s.stage_pairs, default=2) < 2 or s.repeat_pairs == 1:
        raise UserError("--stage-pairs and --repeat-pairs must be at least 2")
    for name, (fewest, most) in (("train-pairs", s.train_pairs), ("long-pairs", s.long_pairs)):
        if not 1 <= fewest <= most:
            raise UserError(f"--{name} must be the fewest and the most pairs, got {fewest} {most}")
    if not 1 <= s.stage_shortest_key:
        raise UserError(f"--stage-shortest-key must be at least 1, got {s.stage_shortest_key}")
    longest = max(shape.tokens(template) for _, _, shape in conditions_and_shapes(s, template))
    longest = max(longest, Shape(1, max(s.test_pairs, *s.eval_pairs), s.key_length, 1).tokens(template))
    if longest > s.max_position_embeddings:
        raise UserError(f"the longest prompt has {longest} tokens; raise --max-position-embeddings or use fewer pairs")
    for pairs in (s.test_pairs, *s.eval_pairs):
        KeyValue(pairs, key_length=s.key_length)


def train(settings: Settings, config: LlamaConfig, template: Template) -> tuple[Llama, dict[str, Any]]:
    """The trained model in float32, and the record of its training."""
    s = settings
    dtype = s.dtype if s.dtype != "auto" else "bfloat16" if jax.default_backend() == "gpu" else "float32"
    model: Any = initial_model(config, s.seed)
    moments = make_optimizer(s).init(model)
    key, watch_key = jax.random.split(jax.random.key(s.seed + 1))
    parts = list(conditions_and_shapes(s, template))
    stages, (short, long) = parts[:-2], parts[-2:]
    choose = np.random.default_rng(s.seed)
    watched = Shape(len(POSITIONS) * s.check_rows, s.test_pairs, s.key_length, 1)
    weights = sum(leaf.size for leaf in jax.tree.leaves(model))
    print(f"{weights:,} weights, {dtype}, {jax.devices()[0].device_kind}")
    for name, conditions, shape in parts:
        print(f"{name}: {shape.rows} rows of {shape.tokens(template)} tokens, {conditions}")

    started = time.monotonic()
    rates = jnp.zeros(s.report_steps, jnp.float32)
    lowered: dict[Shape | None, Any] = {
        shape: train_steps.lower(model, moments, key, rates, conditions, template, shape, s, dtype)
        for _, conditions, shape in parts
    }
    lowered[None] = accuracy_by_position.lower(model, key, template, watched, dtype)
    with ThreadPoolExecutor() as pool:  # XLA compiles them side by side
        programs = dict(zip(lowered, pool.map(lambda program: program.compile(), lowered.values()), strict=True))
    print(f"{len(programs)} programs compiled in {time.monotonic() - started:.0f} s", flush=True)

    log: list[dict[str, Any]] = []
    step, stage = 0, 0
    while step < s.steps:
        seconds = time.monotonic() - started
        progress = max(step / s.steps, seconds / s.max_seconds if s.max_seconds else 0.0)
        if progress >= 1:
            break
        if progress > s.stage_limit:
            stage = len(stages)
        name, conditions, shape = stages[stage] if stage < len(stages) else long if choose.random() < s.long_share else short
        warm = np.minimum(1, (step + 1 + np.arange(s.report_steps)) / s.warmup_steps)
        rates = jnp.asarray(s.learning_rate * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2), jnp.float32)
        model, moments, figures = programs[shape](model, moments, jax.random.fold_in(key, step), rates, conditions)
        loss, value_loss, accuracy = (float(np.mean(figure)) for figure in figures)
        step += s.report_steps
        entry = {
            "step": step,
            "part": name,
            "loss": round(loss, 4),
            "value_loss": round(value_loss, 4),
            "accuracy": round(accuracy, 4),
            "seconds": round(time.monotonic() - started, 2),
        }
        if len(log) % s.check_reports == s.check_reports - 1:
            by_position = programs[None](model, jax.random.fold_in(watch_key, step))
            entry["accuracy_by_position"] = np.asarray(by_position).round(3).tolist()
        log.append(entry)
        print(json.dumps(entry), flush=True)
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss} after {step} steps; lower --learning-rate")
        if stage < len(stages) and accuracy >= s.stage_accuracy:
            stage += 1
    record = {
        "settings": dataclasses.asdict(s) | {"output": s.output.name},
        "weights": weights,
        "dtype": dtype,
        "steps": step,
        "seconds": round(time.monotonic() - started, 1),
        "final": log[-1] if log else None,
        **environment(),
        "log": log,
    }
    return model, record


# What comes out


def save(folder: Path, model: Llama, tokenizer: "PreTrainedTokenizerFast", record: dict[str, Any]) -> None:
    """The folder that `lpes_jax.models.llama.load` and transformers read, with the weights in bfloat16."""
    save_llama(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model), folder)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def measure(settings: Settings) -> dict[str, Any]:
    """Accuracy of the saved model in percent, on questions of the split `search`."""
    s = settings
    loaded = load(str(s.output))
    layers = loaded.model.config.num_layers

    def accuracies(pairs: int, count: int, factors: np.ndarray) -> np.ndarray:
        """Of each row of `factors` at each position."""
        task = KeyValue(pairs, key_length=s.key_length)
        examples = task.examples("search", count, s.eval_seed)
        prompts = [task.prompt(e, task_prompts.slot(p, pairs), p) for e in examples for p in POSITIONS]
        encoded = task_prompts.encode(prompts, loaded.tokenizer, loaded.model.config.max_position_embeddings)
        correct = Scorer(loaded.model, encoded)(factors).correct
        return 100 * correct.reshape(len(factors), count, len(POSITIONS)).mean(axis=1)

    def show(title: str, values: np.ndarray) -> dict[str, Any]:
        by_position = dict(zip(map(str, POSITIONS), values.round(2).tolist(), strict=True))
        print(f"{title:>24}  " + "  ".join(f"{value:5.1f}" for value in values) + f"  mean {values.mean():5.1f}", flush=True)
        return {"accuracy_by_position": by_position, "mean": round(float(values.mean()), 2)}

    print(f"\naccuracy in percent at positions {POSITIONS}, {s.eval_examples} examples, dtype {loaded.identity['dtype']}")
    result: dict[str, Any] = {
        "split": "search",
        "seed": s.eval_seed,
        "examples": s.eval_examples,
        "key_length": s.key_length,
        "model": loaded.identity | {"name": s.output.name},
    }
    as_it_is = np.ones((1, layers))
    result["by_pairs"] = {n: show(f"{n} pairs", accuracies(n, s.eval_examples, as_it_is)[0]) for n in s.eval_pairs}
    if s.sweep:
        print(f"\none uniform factor, {s.test_pairs} pairs")
        swept = accuracies(s.test_pairs, s.eval_examples, np.array(s.sweep)[:, None] * as_it_is)
        result["uniform"] = {factor: show(f"x {factor}", values) for factor, values in zip(s.sweep, swept, strict=True)}
    if s.probe and s.probe_examples:
        profiles = [(kept, factor) for factor in s.probe for kept in range(layers)]
        factors = np.array([np.where(np.arange(layers) < kept, 1.0, factor) for kept, factor in profiles])
        probed = accuracies(s.test_pairs, s.probe_examples, np.concatenate([as_it_is, factors]))
        print(f"\n1 in the first layers, another factor behind, {s.test_pairs} pairs, {s.probe_examples} examples: the best")
        show("as it is", probed[0])
        best = np.argsort(-probed[1:].mean(axis=1), kind="stable")
        result["step"] = [
            {"kept_layers": profiles[i][0], "factor": profiles[i][1]}
            | show(f"{profiles[i][0]} kept, then x {profiles[i][1]}", probed[1 + i])
            for i in best[:12].tolist()
        ]
    return result


def main(settings: Settings) -> None:
    tokenizer = make_tokenizer()
    template = make_template(tokenizer)
    check(settings, template)
    model, record = train(settings, make_config(settings, len(tokenizer)), template)
    save(settings.output, model, tokenizer, record)
    (settings.output / "evaluation.json").write_text(json.dumps(measure(settings), indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except UserError as error:
        sys.exit(f"error: {error}")
