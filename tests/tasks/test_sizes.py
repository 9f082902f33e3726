"""Tasks of a length in tokens, and with only the fact."""

import pytest
from selection import mostly_long
from word_tokenizer import num_words, words

from lpes_jax.errors import UserError
from lpes_jax.tasks import make_task
from lpes_jax.tasks.sizes import SETTINGS, with_length, without_haystack

TASKS = [
    ("kv", {"num_pairs": 5, "queries_per_haystack": 4, "key_length": 8}),
    ("needle", {"num_keys": 2}),
    ("niah", {"subset": "single_1"}),
    ("niah", {"subset": "multikey_3", "queries_per_haystack": 3}),
    ("niah", {"subset": "near_keys"}),
    ("vt", {"placing": "together", "answer_opener": ""}),
]


@pytest.mark.parametrize(("name", "settings"), TASKS)
@pytest.mark.parametrize("tokens", mostly_long([400, 2000], 400))
def test_as_many_items_as_a_length_holds(name, settings, tokens):
    task = with_length(make_task(name, **settings), tokens, words)
    setting = SETTINGS[type(task)]
    lengths = []
    for more in (0, 3):
        longer = make_task(name, **settings | {setting: getattr(task, setting) + more})
        prompts = [
            longer.prompt(example, end_slot)
            for example in longer.examples("test", 30, 5)
            for end_slot in (0, longer.num_items - 1)
        ]
        lengths.append(max(num_words(prompt.text + prompt.answers[0]) for prompt in prompts))
    assert lengths[0] <= tokens < lengths[1] * 1.03
    assert {key: getattr(task, key) for key in settings if key != setting} == {
        k: v for k, v in settings.items() if k != setting
    }


@pytest.mark.parametrize(("name", "settings"), TASKS)
def test_the_fact_without_a_haystack_is_the_shortest_prompt(name, settings):
    task = without_haystack(make_task(name, **settings))
    prompt = task.prompt(task.examples("test", 1, 0)[0], 0)
    assert all(prompt.text.count(gold) == 1 for gold in prompt.references if name != "vt")
    assert "The grass" not in prompt.text.rsplit("Memorize", 1)[-1]
    assert prompt.text.count("special magic number") + prompt.text.count("special magic uuid") in (0, 4)


def test_too_few_tokens_are_refused():
    with pytest.raises(UserError, match="--lengths: 30 tokens are too few for --task niah; its shortest prompts have"):
        with_length(make_task("niah"), 30, words)
    with pytest.raises(TypeError, match="MultipleChoice|CommonWords"):
        without_haystack(make_task("cwe"))
