"""Needles: RULER's words, the depth, the same bytes everywhere, several keys and queries, lengths, scores."""

import re

import pytest
from word_tokenizer import num_words, words

from lpes_jax.errors import UserError
from lpes_jax.tasks.data import split_of
from lpes_jax.tasks.needle import Example, Needle
from lpes_jax.tasks.prompts import Task, slot

TWO = Example((("brave-otter", "1234567"), ("shy-lynx", "7654321")), (1,), ("One.", "Two.", "Three."))

GOLDEN = Example(
    needles=(("sunny-otter", "9955336"), ("eager-beetle", "6747387")),
    other_slots=(0,),
    filler=("The patient driver lent a mirror to the clever shepherd at the library at dawn.",),
)


def test_whole_prompt_byte_for_byte():
    task = Needle(num_sentences=3)
    prompt = task.prompt(Example(TWO.needles[:1], (), TWO.filler), 1)
    assert prompt.text == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
        "number afterwards.\nOne. One of the special magic numbers for brave-otter is: 1234567. Two. Three.\nWhat is the "
        "special magic number for brave-otter mentioned in the provided text? The special magic number for brave-otter "
        "mentioned in the provided text is"
    )
    assert (prompt.answers, prompt.gold, prompt.position, prompt.num_items) == ((" 1234567",), "1234567", 33, 4)
    assert isinstance(task, Task)


def test_several_queries():
    task = Needle(num_sentences=3, num_keys=2, num_queries=2)
    prompt = task.prompt(TWO, 3)
    assert prompt.text.startswith("Some special magic numbers are hidden") and prompt.text.endswith(
        "What are all the special magic numbers for brave-otter, and shy-lynx mentioned in the provided text? "
        "The special magic numbers for brave-otter, and shy-lynx mentioned in the provided text are"
    )
    assert "\nOne. One of the special magic numbers for shy-lynx is: 7654321. Two. Three. One of the" in prompt.text
    assert prompt.references == ("1234567", "7654321") and prompt.answers == (" 1234567, and 7654321",)
    for output, recall, bounded in (
        (" 1234567 and 7654321.", 1, 1),
        ("x7654321", 0.5, 0),
        ("1234567, 1234567", 0.5, 0.5),
        ("", 0, 0),
    ):
        assert task.score(output, prompt) == {"recall": recall, "recall_bounded": bounded}


def test_the_needle_is_at_its_depth_and_all_else_stays():
    task = Needle(num_sentences=20, num_keys=4)
    [example] = task.examples("test", 1, seed=0)
    key, value = example.needles[0]
    needle = f"One of the special magic numbers for {key} is: {value}."
    rest = set()
    for percent in (0, 25, 50, 75, 100):
        gold_slot = slot(percent, task.num_items)
        context = task.prompt(example, gold_slot, percent).text.split("\n")[1]
        before, found, behind = context.partition(needle)
        assert found and sum(sentence in before for sentence in dict.fromkeys(example.filler)) == gold_slot
        rest.add(re.sub(" +", " ", before + behind).strip())
        assert context.count("special magic") == 4 and value not in before + behind
    assert len(rest) == 1
    with pytest.raises(UserError, match="--slots.*0 to 20"):
        task.prompt(example, 21)


def test_generated_bytes_are_the_same_everywhere():
    task = Needle(num_sentences=1, num_keys=2)
    assert task.examples("test", 1, seed=0) == [GOLDEN]
    assert task.examples("test", 3, seed=0)[:1] == [GOLDEN] != task.examples("test", 1, seed=1)


def test_search_and_test_share_no_key():
    task = Needle(num_sentences=1, num_keys=3)
    for split in ("search", "test"):
        assert {split_of(key) for example in task.examples(split, 20, seed=0) for key, _ in example.needles} == {split}
    values = [value for example in task.examples("all", 50, seed=0) for _, value in example.needles]
    assert all(re.fullmatch(r"[1-9]\d{6}", value) for value in values)


@pytest.mark.parametrize("tokens", [100, 500, 2000])
def test_as_many_sentences_as_a_length_holds(tokens):
    task = Needle(num_keys=2).with_length(tokens, words)
    longest = [
        max(num_words(p.text + p.answers[0]) for p in prompts_of(Needle(n, 2)))
        for n in (task.num_sentences, task.num_sentences + 1)
    ]
    assert longest[0] <= tokens < longest[1] and task.num_keys == 2


def prompts_of(task: Needle):
    return [task.prompt(example, 0) for example in task.examples("all", 8, seed=0)]


def test_settings_that_cannot_be():
    for settings, message in (
        ({"num_sentences": 0}, "--num-sentences must be at least 1"),
        ({"num_keys": 2, "num_queries": 3}, "--num-queries 3 and --num-keys 2"),
        ({"num_keys": 51}, "--num-keys must be at most 50"),
        ({"num_keys": 0, "num_queries": 0}, "--num-keys must be at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            Needle(**settings)
    with pytest.raises(UserError, match="--lengths: 20 tokens are too few"):
        Needle().with_length(20, words)
    with pytest.raises(UserError, match="need a --limit"):
        Needle().examples("test", None, seed=0)
