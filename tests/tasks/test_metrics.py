"""When an answer counts as right, and how much."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpes_jax.tasks.metrics import (
    begins_with,
    best_subspan_em,
    choice,
    concordance,
    contains,
    corpus_rouge,
    effective_length,
    exam_letters,
    exam_score,
    exponential_similarity,
    f1,
    first_line,
    normalise,
    rouge,
    substring,
)


@pytest.mark.parametrize(
    "output, right",
    [
        ("ab-12", True),
        (' "AB-12"}', True),  # framed, and in another case
        ("\n\nThe value is ab-12.", True),  # no first-line rule for key-value retrieval
        ("ab-1", False),
        ("ab 12", False),
        ("", False),
    ],
)
def test_substring(output, right):
    assert substring(output, "ab-12") is right
    assert substring(output, "AB-12") is right


@pytest.mark.parametrize(
    "output, right",
    [([5, 6, 7], True), ([5, 6], True), ([8, 9, 1], True), ([5], False), ([4, 5, 6], False), ([6, 5], False), ([], False)],
)
def test_begins_with(output, right):
    assert begins_with(output, [[5, 6], [8]]) is right
    assert begins_with(tuple(output), ((5, 6), (8,))) is right


def test_begins_with_no_admitted_answer():
    assert begins_with([1, 2], []) is False


@pytest.mark.parametrize(
    "text, normal",
    [
        ("The  Spider-Man,\tan A.", "spiderman"),
        ("theatre of a Anne", "theatre of anne"),
        ("U.S.A.", "usa"),
        ("*", ""),
        ("Beyoncé – “live”", "beyoncé – “live”"),  # only ASCII punctuation goes
    ],
)
def test_normalise(text, normal):
    assert normalise(text) == normal


def test_normalise_unicode():
    assert normalise("Beyoncé – “live”", unicode=True) == "beyonce live"
    assert normalise("Röntgen’s", unicode=True) == "rontgens"


def test_first_line():
    assert [first_line("\n \n Paris \nRome", rule) for rule in ("stripped", "original", "all")] == [
        "Paris",
        "",
        "\n \n Paris \nRome",
    ]
    assert first_line("") == ""


@given(st.text(alphabet="ab1 .\n", max_size=12), st.text(alphabet="ab1 .", max_size=4))
@settings(max_examples=200, deadline=None)
def test_the_original_rules_are_the_originals(output, gold):
    answer, wanted = normalise(output.split("\n")[0].strip()), normalise(gold)
    assert best_subspan_em(output, [gold], rule="original", empty_golds_match=True) == (wanted in answer)


def test_bounded_at_word_ends():
    assert contains("in 1920s", "2") and not contains("in 1920s", "2", bounded=True)
    assert contains("2 of 3", "2", bounded=True) and contains("of 2", "2", bounded=True)
    assert best_subspan_em("the 1920s", ["2"]) and not best_subspan_em("the 1920s", ["2"], bounded=True)


@pytest.mark.parametrize(
    "output, golds, score",
    [
        ("the cat sat", ["a cat sat down"], 0.8),  # 2 common; 2 and 3 words: 4 / 5
        ("the cat sat", ["dog", "Cat sat!"], 1.0),
        ("cat cat", ["cat"], 2 / 3),
        ("dog", ["cat"], 0.0),
        ("", ["cat"], 0.0),
        ("the", ["a"], 0.0),  # nothing is left of either: SQuAD's gives 0
    ],
)
def test_f1(output, golds, score):
    assert f1(output, golds) == pytest.approx(score)


def test_rouge_by_hand():
    # 6 and 7 words, 5 common; 5 and 6 bigrams, "the cat", "on the", "the mat" common; "the cat on the mat" in order.
    scores = rouge("the cat sat on the mat", ["the cat was lying on the mat"])
    expected = {"rouge1": 10 / 13, "rouge2": 6 / 11, "rougeL": 10 / 13}
    assert scores == pytest.approx({"rouge": (10 / 13 * 6 / 11 * 10 / 13) ** (1 / 3), **expected})
    assert list(scores) == ["rouge", "rouge1", "rouge2", "rougeL"]


def test_rouge_takes_the_best_gold_for_each_and_does_not_stem():
    assert rouge("one two", ["two one", "one two three four"])["rouge1"] == 1  # by the first
    assert rouge("one two", ["two one", "one two three four"])["rouge2"] == pytest.approx(0.5)  # by the second
    assert rouge("cats", ["cat"])["rouge"] == rouge("", ["cat"])["rouge"] == 0


def test_corpus_rouge_is_the_mean_of_means():
    scores = [{"rouge1": 1.0, "rouge2": 0.0, "rougeL": 0.5}, {"rouge1": 0.5, "rouge2": 0.25, "rougeL": 0.5}]
    assert corpus_rouge(scores) == pytest.approx((0.75 * 0.125 * 0.5) ** (1 / 3))
    assert corpus_rouge(scores[:1]) == 0


@pytest.mark.parametrize(
    "output, score",
    [("70%", 1), ("about 60% of them", 0.5), ("It is 90.0%, not 70%", 0.25), ("70", 0), ("none", 0), ("0%", 2**-7)],
)
def test_exponential_similarity(output, score):
    assert exponential_similarity(output, "70%") == pytest.approx(score)


@pytest.mark.parametrize(
    "output, score",
    [
        ("2, 3, 1", 1),
        ("1, 3, 2", 0),
        ("Order: 2 1 3.", 2 / 3),
        ("3, 2, 1", 2 / 3),
        ("2, 3", 0),
        ("2, 3, 1, 1", 0),
        ("2, 3, 4", 0),
        ("", 0),
    ],
)
def test_concordance(output, score):
    assert concordance(output, "2, 3, 1") == pytest.approx(score)


def test_choice():
    assert [choice(text) for text in ("(B) because", "Answer: C", "A good answer is B", "ABC", "b", "")] == [
        "B",
        "C",
        "A",
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    "output, one, several",
    [
        ("C", "C", "C"),
        ("BC", "BC", "BC"),  # a piece of "ABCD" is taken as it is
        ("DB", "D", "BD"),
        ("ACD is right", "A", "ACD"),
        ("The answers are B) and D.", "B", "BD"),
        ("it is BD", "B", "BD"),
        ("Answer: A", "A", "A"),
        ("A. Both. Question 2: B. ", "A", "A"),  # nothing behind "Question"
        ("no idea", "A", "A"),  # the benchmark's guess
        ("  \n", "None", "None"),
    ],
)
def test_letters_of_an_exam(output, one, several):
    assert exam_letters(output, several=False) == one
    assert exam_letters(output, several=True) == several


@pytest.mark.parametrize(
    "said, gold, score", [("BD", "BD", 1), ("B", "BD", 0.25), ("BC", "BD", 0), ("B", "C", 0), ("None", "A", 0)]
)
def test_partial_credit(said, gold, score):
    assert exam_score(said, gold) == score


@pytest.mark.parametrize(
    "scores, length",
    [([0.9, 0.8, 0.7, 0.1], 2000), ([0.9, 0.2, 0.8, 0.1], 4000), ([0.5, 0.1, 0.1, 0.1], 1000), ([0.0, 0.0, 0.0, 0.0], None)],
)
def test_effective_length(scores, length):
    assert effective_length([1000, 2000, 4000, 8000], scores) == length
    assert effective_length([8000, 1000, 4000, 2000], [scores[3], scores[0], scores[2], scores[1]]) == length


def test_effective_length_at_another_threshold():
    assert effective_length([1, 2, 3], [1.0, 0.5, 0.4], threshold=0.5) == 2
