"""Tiny training: its prompts are the task's, gold is where the flags say, it learns, its folder loads everywhere."""

import json
import sys
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lpes_jax.errors import UserError
from lpes_jax.models.llama import load
from lpes_jax.models.llama.model import hidden_states, output_logits
from lpes_jax.rope import rope_table
from lpes_jax.tasks.key_value import Example, KeyValue
from lpes_jax.tasks.prompts import encode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))
import train_tiny_model as tiny  # noqa: E402
from measure_tiny_model import Measurement  # noqa: E402
from tiny_prompts import (  # noqa: E402
    PIECES,
    Conditions,
    Content,
    Rows,
    Shape,
    assemble,
    draw_content,
    draw_slots,
    make_template,
    make_tokenizer,
)

TINY = tiny.Settings(
    output=Path("unused"),
    key_length=4,
    test_pairs=4,
    train_pairs=(2, 3),
    long_pairs=(3, 3),
    repeat_pairs=0,
    stage_pairs=(3,),  # one shape for all parts: one compilation
    stage_shortest_key=2,
    stage_questions=1,
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    batch_tokens=512,
    report_steps=4,
    warmup_steps=4,
    learning_rate=3e-3,
    dtype="float32",
    eval_pairs=(4,),
    eval_examples=2,
    sweep=(0.5,),
    probe=(),
    probe_examples=1,
)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def template(tokenizer):
    return make_template(tokenizer)


@partial(jax.jit, static_argnames=("template", "shape"))
def draw(template, shape, conditions, seed) -> tuple[Content, Rows]:
    content = draw_content(jax.random.key(seed), shape, conditions)
    return content, assemble(template, shape, content)


def hexadecimal(digits) -> str:
    return "".join("0123456789abcdef"[digit] for digit in digits)


def examples_of(content: Content, row: int) -> list[Example]:
    """The task's own examples for the questions of a row."""
    pairs, length = int(content.pairs[row]), int(content.key_length[row])
    records = [tuple(hexadecimal(text[:length]) for text in record) for record in np.asarray(content.digits[row, :pairs])]
    return [
        Example(*records[slot], tuple(record for index, record in enumerate(records) if index != slot))
        for slot in np.asarray(content.slots[row]).tolist()
    ]


@pytest.mark.parametrize("key_length", [(3, 5), (8, 8)])
def test_rows_are_the_tasks_prompts_as_the_tokenizer_cuts_them(tokenizer, template, key_length):
    shape = Shape(rows=6, pairs=5, key_length=key_length[1], questions=1)
    conditions = Conditions((1, 5), key_length, 0.5, 0.2, 0.5)
    content, rows = draw(template, shape, conditions, 0)
    assert not content.repeats.any()
    assert rows.tokens.shape == (6, shape.tokens(template)) and len(set(np.asarray(content.pairs).tolist())) > 2
    for row in range(6):
        [example] = examples_of(content, row)
        prompt = KeyValue(int(content.pairs[row])).prompt(example, int(content.slots[row, 0]))
        [encoded] = encode([prompt], tokenizer, window=1000)
        [value] = encoded.answers
        wanted = [*encoded.ids, *value, *tokenizer('"', add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        tokens = rows.tokens[row].tolist()
        assert tokens[: len(wanted)] == wanted
        assert set(tokens[len(wanted) :]) <= {tokenizer.eos_token_id}
        assert tokenizer.decode(rows.tokens[row][rows.is_value[row]].tolist()) == example.value
        assert tokenizer.decode(rows.tokens[row][rows.is_key[row]].tolist()) == example.key
        closes = np.flatnonzero(rows.is_close[row]).tolist()
        assert closes == [len(wanted) - 2, len(wanted) - 1]


def test_several_questions_follow_one_another(tokenizer, template):
    shape = Shape(rows=4, pairs=3, key_length=4, questions=3)
    content, rows = draw(template, shape, Conditions((2, 3), (2, 4), 0.0, 0.1, 0.5), 1)
    for row in range(4):
        examples = examples_of(content, row)
        first = KeyValue(int(content.pairs[row])).prompt(examples[0], int(content.slots[row, 0])).text
        text = first + "".join(f'{e.value}"\n\nKey: "{after.key}"\nCorresponding value: "' for e, after in pairwise(examples))
        wanted = tokenizer(text + examples[-1].value + '"')["input_ids"]
        tokens = rows.tokens[row].tolist()
        assert tokens[: len(wanted) + 1] == [*wanted, tokenizer.eos_token_id]
        for question, example in enumerate(examples):
            value_tokens = np.asarray(rows.is_value[row] & (rows.question[row] == question))
            assert tokenizer.decode(np.asarray(rows.tokens[row])[value_tokens].tolist()) == example.value


def test_the_loss_is_on_repetitions_and_fixed_tokens_and_never_on_new_digits(tokenizer, template):
    shape = Shape(rows=8, pairs=6, key_length=4, questions=1)
    conditions = Conditions((4, 6), (3, 4), 0.0, 0.1, 0.5, distinct=2)
    content, rows = draw(template, shape, conditions, 5)
    for row in range(8):
        pairs = int(content.pairs[row])
        [example] = examples_of(content, row)
        records = [
            tuple(hexadecimal(part[: int(content.key_length[row])]) for part in record)
            for record in np.asarray(content.digits[row, :pairs])
        ]
        assert len(set(records)) <= 2
        keys, values = "", ""
        for index, (key, value) in enumerate(records):
            if (key, value) in records[:index]:
                keys, values = keys + key, values + value
        tokens, is_fixed = np.asarray(rows.tokens[row]), np.asarray(rows.is_fixed[row])
        assert tokenizer.decode(tokens[rows.is_key[row]].tolist()) == keys + example.key
        assert tokenizer.decode(tokens[rows.is_value[row]].tolist()) == values + example.value
        closes = int(np.asarray(rows.is_close[row]).argmax())
        counted = np.asarray(rows.is_key[row] | rows.is_value[row] | rows.is_close[row] | rows.is_fixed[row])
        assert (~counted[1:closes]).sum() == len(set(records)) * 2 * int(content.key_length[row])  # where they are new
        assert not set(tokens[is_fixed].tolist()) & set(template.digits) and not is_fixed[0] and not is_fixed[closes:].any()


def test_every_digit_is_a_token_and_openers_do_not_change_the_prompt(tokenizer):
    task = KeyValue(3, key_length=8)
    prompts = [variant.prompt(example, 1) for example in task.examples("search", 40, 1) for variant in (task, task.plain)]
    for prompt, encoded in zip(prompts, encode(prompts, tokenizer, window=1000), strict=True):
        assert len(encoded.answers) == len(prompt.answers)  # none merges with the prompt's end
        assert encoded.ids.count(tokenizer.bos_token_id) == 1 and encoded.ids[0] == tokenizer.bos_token_id
        for text, answer in zip(prompt.answers, encoded.answers, strict=True):
            assert len(answer) == 8 + (text != prompt.gold)
        assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == prompt.text
    assert not any(set(piece.strip()) <= set("0123456789abcdef") for piece in PIECES if piece.strip())


def test_gold_is_where_the_flags_say():
    pairs = jnp.full(20_000, 20)

    def shares(edge_share, edge_width, end_share=0.5):
        conditions = Conditions((20, 20), (4, 4), edge_share, edge_width, end_share)
        slots = np.asarray(draw_slots(jax.random.key(2), pairs, 2, conditions))
        return np.bincount(slots.ravel(), minlength=20) / slots.size

    np.testing.assert_allclose(shares(0.0, 0.15), 1 / 20, atol=0.005)
    wanted = np.full(20, 0.1 / 20)
    wanted[[0, 1, 2, 17, 18, 19]] += 0.9 / 6
    np.testing.assert_allclose(shares(0.9, 0.15), wanted, atol=0.006)
    only_ends = shares(1.0, 0.0, end_share=0.2)  # one pair at each end, at least
    np.testing.assert_allclose(only_ends[[0, 19]], [0.8, 0.2], atol=0.01)
    assert only_ends[1:19].sum() == 0
    one = draw_slots(jax.random.key(0), jnp.ones(50, jnp.int32), 1, Conditions((1, 1), (4, 4), 0.5, 0.5, 0.5))
    assert not one.any()


@pytest.mark.long
@pytest.mark.promotes
def test_a_few_steps_fit_one_batch(template):
    config = tiny.make_config(TINY, len(make_tokenizer()))
    model, optimizer = tiny.initial_model(config, 0), tiny.make_optimizer(TINY)
    shape = Shape(rows=4, pairs=2, key_length=4, questions=1)
    _, rows = draw(template, shape, Conditions((2, 2), (4, 4), 0.0, 0.1, 0.5), 3)

    @jax.jit
    def step(model, moments):
        (loss, _), grads = jax.value_and_grad(tiny.batch_loss, has_aux=True)(model, rows, 1, 0.25, 0.05, "float32")
        updates, moments = optimizer.update(grads, moments, model)
        return jax.tree.map(lambda leaf, update: leaf - 0.01 * update, model, updates), moments, loss

    moments, losses = optimizer.init(model), []
    for _ in range(40):
        model, moments, loss = step(model, moments)
        losses.append(float(loss))
    assert 4 < losses[0] < 9  # a guess among 288 tokens costs 5.7 nats
    assert losses[-1] < 0.3
    _, (_, accuracy) = jax.jit(tiny.batch_loss, static_argnums=(2, 5))(model, rows, 1, 0.25, 0.05, "float32")
    assert accuracy == 1


def test_a_value_is_right_only_in_whole(template):
    shape = Shape(rows=2, pairs=2, key_length=3, questions=2)
    _, rows = draw(template, shape, Conditions((2, 2), (3, 3), 0.0, 0.1, 0.5), 4)
    right = jnp.ones(rows.tokens.shape, bool)
    second = np.flatnonzero(rows.is_value[1] & (rows.question[1] == 1))
    right = right.at[1, int(second[2])].set(False).at[0, 0].set(False)  # a digit of one value; a token of no value
    assert tiny.whole_values(rows, right, 2).tolist() == [[True, True], [True, False]]


@pytest.mark.promotes
@pytest.mark.long
def test_the_folder_loads_here_and_in_transformers(tmp_path, capsys):
    settings = replace(TINY, output=tmp_path / "model", steps=12, check_reports=2, check_rows=2, stage_accuracy=0.0)
    tiny.main(settings)
    files = {file.name for file in settings.output.iterdir()}
    assert files == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
        "evaluation.json",
    }
    record = json.loads((settings.output / "training.json").read_text())
    assert record["settings"]["train_pairs"] == [2, 3] and record["steps"] == 12
    assert [entry["part"] for entry in record["log"]][0] == "stage 3"
    assert {entry["part"] for entry in record["log"][1:]} <= {"short", "long"}
    assert len(record["log"][1]["accuracy_by_position"]) == 5
    evaluation = json.loads((settings.output / "evaluation.json").read_text())
    assert evaluation["split"] == "search" and set(evaluation["by_pairs"]) == {"4"} and set(evaluation["uniform"]) == {"0.5"}
    assert "4 pairs" in capsys.readouterr().out

    loaded = load(str(settings.output), "float32")
    task = KeyValue(3, key_length=4)
    prompts = [task.prompt(example, 1) for example in task.examples("search", 2, 0)]
    ids = [encoded.ids for encoded in encode(prompts, loaded.tokenizer, 2048)]
    assert ids == [encoded.ids for encoded in encode(prompts, make_tokenizer(), 2048)]
    config = loaded.model.config
    table = rope_table(config.rope, config.head_dim, config.num_layers)
    ours = output_logits(loaded.model, hidden_states(loaded.model, jnp.asarray(ids), table))
    np.testing.assert_allclose(ours, tiny.token_logits(loaded.model, jnp.asarray(ids), "float32"), atol=1e-5)

    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(settings.output)([prompt.text for prompt in prompts])["input_ids"] == ids
    theirs = AutoModelForCausalLM.from_pretrained(settings.output, dtype=torch.float32)
    with torch.no_grad():
        np.testing.assert_allclose(ours, theirs(torch.tensor(ids)).logits.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train_pairs": (5, 4)}, "--train-pairs must be the fewest and the most pairs, got 5 4"),
        ({"long_pairs": (0, 4)}, "--long-pairs"),
        ({"stage_pairs": (1,)}, "--stage-pairs and --repeat-pairs must be at least 2"),
        ({"max_position_embeddings": 64}, "raise --max-position-embeddings"),
        ({"output": ROOT}, "is not empty"),
    ],
)
def test_settings_that_cannot_be(template, changes, message):
    with pytest.raises(UserError, match=message):
        tiny.check(replace(TINY, **changes), template)


def test_the_defaults_are_the_bundled_models_recipe():
    recorded = json.loads((ROOT / "models" / "zoo" / "tiny-retriever" / "training.json").read_text())["settings"]
    measured = {field.name for field in fields(Measurement)} - {"key_length"}
    ours = json.loads(json.dumps(asdict(tiny.Settings(output=Path("unused"))), default=str))
    assert {k: v for k, v in ours.items() if k not in measured} == {k: recorded[k] for k in ours if k not in measured}
