"""Slots, and tokenisation of prompt and answer together, with tokenizers trained here on a few strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from word_tokenizer import num_words, words

from lpes_jax.errors import UserError
from lpes_jax.tasks.chat import ChatTask
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.prompts import Cut, Prompt, before_stop, checked_stop, continuation, encode, fit, position, slot, token_ids


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


def test_prompts_without_answers_have_only_ids(tokenizer):
    [encoded] = encode([Prompt("the key", (), "gold", "e", 0, 0, 1)], tokenizer, window=10)
    assert encoded.ids == tokenizer("the key")["input_ids"] and encoded.answers == []


# What fits


def placed(example: str, position: int, num_words: int, cut: Cut | None = None) -> Prompt:
    return Prompt(" ".join(["w"] * num_words), (" a b",), "a b", example, position, 0, 1, cut=cut)


def test_too_long_is_an_error_and_skipping_leaves_the_example_out_at_every_position():
    prompts = [placed(example, position, n) for example, n in (("x", 5), ("y", 9), ("z", 6)) for position in (0, 100)]
    prompts[1] = placed("x", 100, 10)
    assert fit(prompts, words, window=12).prompts == prompts  # ten words and two of the answer
    with pytest.raises(
        UserError, match="1 questions are too long: up to 12 tokens, more than the model's window of 11; .*skip"
    ):
        fit(prompts, words, window=11)
    fitted = fit(prompts, words, window=11, overlength="skip")
    assert fitted.skipped == ["x"] and fitted.num_cut == 0
    assert [(prompt.example, prompt.position) for prompt in fitted.prompts] == [("y", 0), ("y", 100), ("z", 0), ("z", 100)]
    assert fit(prompts, words, window=11, new_tokens=5, overlength="skip").skipped == ["x", "y"]
    with pytest.raises(UserError, match="2 questions .*the smaller of .*window of 50 less 5 to generate and the task's own 8"):
        fit(prompts, words, window=50, max_prompt_tokens=8, new_tokens=5)


@given(st.integers(2, 60), st.integers(0, 30), st.integers(2, 70))
def test_a_cut_leaves_the_most_that_fits(length, start, budget):
    start = min(start, length - 1)
    text = " ".join(["w"] * length) + " q ?"
    prompt = Prompt(text, (), "g", "e", 0, 0, 1, cut=Cut(2 * start, 2 * length - 1, " ..."))
    fitted = fit([prompt], words, 1000, max_prompt_tokens=budget, overlength="skip")
    if length + 2 <= budget:
        assert fitted == ([prompt], [], 0)
    elif start + 3 > budget:
        assert fitted == ([], ["e"], 0)
    else:
        [cut] = fitted.prompts
        assert cut.was_cut and fitted.num_cut == 1 and num_words(cut.text) == budget
        assert cut.text.split() == ["w"] * (budget - 3) + ["...", "q", "?"]


def test_the_byte_level_tokenizers_bos_is_counted_and_stays(tokenizer):
    text = "key " * 100 + "value: 7"
    prompt = Prompt(text, (), "g", "e", 0, 0, 1, cut=Cut(0, text.index("value")))
    [cut] = fit([prompt], tokenizer, 1000, max_prompt_tokens=40).prompts
    ids = tokenizer(cut.text)["input_ids"]
    assert len(ids) == 40 and ids[0] == tokenizer.bos_token_id and cut.text.endswith("value: 7")


def test_in_a_chat_the_same_part_is_cut_and_options_lose_their_space():
    class Reading:
        name, num_items, plain = "reading", 1, None
        decided_by, metrics, max_new_tokens, max_prompt_tokens, stop = "options", ("acc",), 1, 12, ()

        def examples(self, split, count, seed):
            return ["e"]

        def prompt(self, example, slot, position=None):
            text = "\nRead: one two three four five six. Which?\n"
            cut = Cut(text.index("one"), text.index(" Which"), " ...")
            return Prompt(text, (" A",), "A", example, 0, 0, 1, options=(" A", " B"), cut=cut)

        def score(self, output, prompt):
            return {"acc": float(output.strip() == prompt.gold)}

    for render in (lambda text: f"<user>{text}</user>\n", lambda text: f"<user> System. </user> <user>{text.strip()}</user>\n"):
        task = ChatTask(Reading(), render)
        prompt = task.prompt("e", 0)
        assert prompt.text[prompt.cut.start : prompt.cut.end] == "one two three four five six."
        assert prompt.options == ("A", "B") and prompt.answers == (" A", "A")
        [cut] = fit([prompt], words, 100, max_prompt_tokens=num_words(prompt.text) - 3).prompts
        assert cut.was_cut and cut.text.endswith("... Which?</user>\n" if "System" in cut.text else "... Which?\n</user>\n")
        assert (task.decided_by, task.metrics, task.max_new_tokens, task.max_prompt_tokens, task.stop) == (
            "options",
            ("acc",),
            1,
            12,
            (),
        )
        assert task.score("A", prompt) == {"acc": 1}
    rewritten = ChatTask(Reading(), lambda text: text.upper())
    assert rewritten.prompt("e", 0).cut is None


def test_answers_after_white_space_have_none_of_their_own():
    assert [continuation(text, "x") for text in ("Answer:", "Answer:\n", "Answer: ", "")] == [" x", "x", "x", " x"]


def test_stop_texts():
    assert before_stop("one\ntwo. three", (". ", "\n")) == "one"
    assert before_stop("one", ("\n",)) == before_stop("one", ()) == "one"
    assert before_stop("\none", ("\n",)) == ""
    assert checked_stop(["\n", "."]) == ("\n", ".")
    for wrong, message in (("\\n", "has a backslash and an n, not a line end"), ("", "is empty")):
        with pytest.raises(UserError, match=f"--stop .*{message}"):
            checked_stop([wrong])


def test_a_text_is_asked_of_a_tokenizer_once():
    asked = []

    def tokenizer(texts):
        asked.extend(texts)
        return {"input_ids": [[len(text), ord(text[0])] for text in texts]}

    assert token_ids(tokenizer, ["one", "two", "one"]) == [[3, 111], [3, 116], [3, 111]]
    first = token_ids(tokenizer, ["two", "three"])
    first[0].append(7)  # a caller's list is its own
    assert token_ids(tokenizer, ["two"]) == [[3, 116]]
    assert asked == ["one", "two", "three"]
