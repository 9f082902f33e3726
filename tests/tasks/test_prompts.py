"""Slots, and tokenisation of prompt and answer together, with tokenizers trained here on a few strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lpes_jax.errors import UserError
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.prompts import Prompt, encode, position, slot


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that has learned ` 7` as one token, and puts one <s> before everything."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(["value: 7 7 7 7", 'Corresponding value: "', "the key the value"] * 20, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>")


def make_prompt(text: str, *answers: str) -> Prompt:
    return Prompt(text=text, answers=answers, gold=answers[0], example="e", position=0, slot=0, num_items=1)


def test_slots_by_integers():
    assert [slot(p, 10) for p in (0, 25, 50, 75, 100)] == [0, 2, 4, 6, 9]
    assert [slot(p, 50) for p in (0, 25, 50, 75, 100)] == [0, 12, 24, 36, 49]
    assert [slot(p, 101) for p in range(101)] == list(range(101))  # int(0.29 * 100) is 28
    assert slot(100, 1) == 0


@pytest.mark.parametrize("wrong", [-1, 101])
def test_positions_are_percentages(wrong):
    with pytest.raises(UserError, match="--positions"):
        slot(wrong, 10)


def test_positions_of_slots():
    assert [position(s, 10) for s in (0, 3, 5, 7, 9)] == [0, 33, 56, 78, 100]
    assert position(0, 1) == 0
    with pytest.raises(UserError, match="--slots"):
        position(10, 10)


@given(st.integers(1, 60), st.integers(0, 100))
def test_slots_exist_and_stand_at_or_before_their_position(num_items, percent):
    index = slot(percent, num_items)
    assert 0 <= index < num_items
    assert 100 * index <= percent * (num_items - 1) < 100 * (index + 1)


def test_text_and_answer_are_tokenised_together(tokenizer):
    task = KeyValue(num_pairs=4, key_length=6)
    prompts = [task.prompt(example, s) for example in task.examples("test", 3, seed=0) for s in (0, 3)]
    encoded = encode(prompts, tokenizer, window=1000)
    assert len(encoded) == 6
    for prompt, ids in zip(prompts, encoded, strict=True):
        assert ids.ids + ids.answers[0] == tokenizer(prompt.text + prompt.answers[0])["input_ids"]
        assert tokenizer.decode(ids.answers[0]) == prompt.gold
        assert ids.ids.count(tokenizer.bos_token_id) == 1 and ids.ids[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in ids.answers[0]


def test_each_admitted_opener_is_an_answer_of_its_own(tokenizer):
    task = KeyValue(num_pairs=2, answer_opener=None)
    [example] = task.examples("test", 1, seed=0)
    [encoded] = encode([task.prompt(example, 0)], tokenizer, window=1000)
    assert [tokenizer.decode(answer) for answer in encoded.answers] == [" " + example.value, ' "' + example.value]


def test_an_answer_that_merges_with_the_end_of_the_text_is_dropped(tokenizer):
    text, joint = tokenizer("value: ")["input_ids"], tokenizer("value: 7")["input_ids"]
    assert joint[: len(text)] != text  # what this test needs: " 7" is one token
    [encoded] = encode([make_prompt("value: ", "7", "x")], tokenizer, window=100)
    assert encoded.ids == text
    assert [tokenizer.decode(answer) for answer in encoded.answers] == ["x"]


def test_no_reachable_answer_is_an_error_that_names_the_opener(tokenizer):
    with pytest.raises(UserError, match="'value: ', merges with the answer '7'.*--answer-opener"):
        encode([make_prompt("value:", " 7"), make_prompt("value: ", "7")], tokenizer, window=100)


def test_the_window_counts_prompt_and_answer(tokenizer):
    prompts = [make_prompt("key", " the"), make_prompt("the key the value:", " 7", ' "7')]
    longest = max(len(tokenizer(prompts[1].text + answer)["input_ids"]) for answer in prompts[1].answers)
    assert len(encode(prompts, tokenizer, window=longest)) == 2
    with pytest.raises(UserError, match=f"is {longest} tokens.*window is {longest - 1}.*--num-pairs"):
        encode(prompts, tokenizer, window=longest - 1)


def test_no_prompts(tokenizer):
    assert encode([], tokenizer, window=10) == []
