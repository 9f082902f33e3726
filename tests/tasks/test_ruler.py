"""RULER's tasks: prompts and scores equal to its own scripts' (tests/golden/ruler.json), and the depth under control.

The golden file has prompts and scores of NVIDIA/RULER's own functions (Apache-2.0; it says which), with the inputs that they
drew.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from word_tokenizer import words

import lpes_jax as lj
from lpes_jax.errors import UserError
from lpes_jax.tasks import common_words, frequent_words, make_task, niah, variable_tracking
from lpes_jax.tasks.data import split_of
from lpes_jax.tasks.prompts import Task, encode, slot
from lpes_jax.tasks.ranged import Ranged
from lpes_jax.tasks.words import ADJECTIVES, NOUNS, VERBS

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "ruler.json").read_text(encoding="utf-8"))
ESSAY = re.findall(r"\S.*?[.](?= |$)", GOLDEN["essay"])
NEEDLE = "One of the special magic {kind} for {key} is: {value}."


def ours(name: str, row: dict[str, Any]) -> tuple[Task, Any, int]:
    """Our task, example and slot for the inputs that RULER's functions drew."""
    if "sentences" in row:
        sentences = (*ESSAY[: row["sentences"] - 1], row["cut"])
        needles = tuple(map(tuple, row["needles"]))
        return niah.Niah(name, len(sentences)), niah.Example(needles, tuple(row["at"][1:]), sentences), row["at"][0]
    if name in niah.VARIANTS:
        kind = "uuids" if name == "multikey_3" else "numbers"
        noise = [niah.NOISE] * row["others"] if name == "single_1" else None
        lines = noise or [NEEDLE.format(kind=kind, key=key, value=value) for key, value in row["others"]]
        return niah.Niah(name, len(lines)), niah.Example(((row["key"], row["value"]),), (), tuple(lines)), row["slot"]
    if name == "vt":

        def chain(row: dict[str, Any]) -> variable_tracking.Chain:
            return variable_tracking.Chain(row["value"], tuple(row["names"]), tuple(row["at"]))

        shot = row["shot"]
        example = variable_tracking.Example((chain(row),), row["num_lines"], chain(shot), shot["lines"])
        return variable_tracking.VariableTracking(row["num_lines"]), example, 0
    if name == "fwe":
        example = frequent_words.Example(tuple(row["words"]), row["order"])
        return frequent_words.FrequentWords(row["num_words"], row["alpha"]), example, 0
    example = common_words.Example(tuple(row["words"]), tuple(row["shot"]), row["order"], row["order"])
    return common_words.CommonWords(len(row["words"]), row["short_lists"]), example, 0


@pytest.mark.parametrize("name", GOLDEN["prompts"])
def test_prompts_are_those_of_rulers_scripts_for_the_same_inputs(name):
    for row in GOLDEN["prompts"][name]:
        task, example, gold_slot = ours(name, row)
        prompt = task.prompt(example, gold_slot)
        if "text" in row:
            assert prompt.text == row["text"]
        assert hashlib.sha256(prompt.text.encode()).hexdigest() == row["sha256"]
        assert sorted(prompt.references) == sorted(row["answers"])
        assert isinstance(task, Task) and task.metrics[0] == "recall"
    assert task.max_new_tokens == {"vt": 30, "cwe": 120, "fwe": 50}.get(name, 128)


@pytest.mark.parametrize("name", GOLDEN["scores"])
def test_scores_are_those_of_rulers_scorer(name):
    task, example, gold_slot = ours(name, GOLDEN["prompts"][name][0])
    prompt = task.prompt(example, gold_slot)
    scored = GOLDEN["scores"][name]["scored"]
    assert len(scored) == 50 and len({score for _, score in scored}) > 1
    for output, score in scored:
        assert task.score(output, prompt)["recall"] == pytest.approx(score, abs=1e-12), output


def context(text: str) -> str:
    return text.split("\n", 1)[1].rsplit("\nWhat ", 1)[0]


@pytest.mark.parametrize("subset", niah.VARIANTS)
def test_the_needle_is_at_its_depth_and_all_else_stays(subset):
    task = niah.Niah(subset, num_lines=20)
    [example] = task.examples("test", 1, seed=3)
    key, value = example.needles[0]
    fact = NEEDLE.format(kind=niah.VARIANTS[subset].kind, key=key, value=value)
    rest = set()
    for percent in (0, 25, 50, 75, 100):
        gold_slot = slot(percent, task.num_items)
        before, found, behind = context(task.prompt(example, gold_slot, percent).text).partition(fact)
        assert found and sum(before.count(line) for line in dict.fromkeys(example.lines)) == gold_slot
        rest.add(" ".join((before + behind).split()))
        assert value not in before + behind
    assert len(rest) == 1
    with pytest.raises(UserError, match="--slots.*0 to 20"):
        task.prompt(example, 21)


def test_several_needles_are_asked_for_and_the_one_at_the_slot_has_a_score_of_its_own():
    for subset, keys in (("multivalue", 1), ("multiquery", 4)):
        task = niah.Niah(subset, num_lines=8)
        [example] = task.examples("all", 1, seed=0)
        prompt = task.prompt(example, 4)
        values = prompt.references
        assert len({key for key, _ in example.needles}) == keys and len(set(values)) == 4
        several = f"{values[0]}, {values[1]}, {values[2]}, and {values[3]}"
        assert prompt.answers == (f" {several}", f": {several}")
        assert task.score(f"{values[0]} and {values[2]}", prompt) == {"recall": 0.5, "recall_bounded": 0.5, "at_slot": 1}
        assert task.score(f"x{values[1]}", prompt) == {"recall": 0.25, "recall_bounded": 0, "at_slot": 0}


def test_distractors_share_a_word_with_the_key_that_is_asked_for():
    [example] = niah.Niah("near_keys", num_lines=30, num_keys=20).examples("test", 1, seed=0)
    (asked, _), *others = example.needles
    assert len(others) == 19 and len({key for key, _ in example.needles}) == 20
    shared = [{0: key.split("-")[0] == asked.split("-")[0], 1: key.split("-")[1] == asked.split("-")[1]} for key, _ in others]
    assert (
        all(halves[0] != halves[1] for halves in shared)
        and any(halves[0] for halves in shared)
        and any(halves[1] for halves in shared)
    )


def test_questions_about_the_same_lines_ask_for_those_nearest_to_the_slot():
    task = niah.Niah("multikey_3", num_lines=9, queries_per_haystack=3)
    examples = task.examples("search", 6, seed=1)
    texts = {
        (n, gold_slot): task.prompt(example, gold_slot).text for n, example in enumerate(examples) for gold_slot in (0, 5, 9)
    }
    assert len({context(texts[n, gold_slot]) for n in (0, 1, 2) for gold_slot in (0, 5, 9)}) == 1 != len(set(texts.values()))
    assert [sorted(example.slot(5) for example in examples[:3]), examples[0].slot(5)] == [[4, 5, 6], 5]
    assert {split_of(key) for example in examples for key, _ in example.needles} == {"search"}
    assert len({example.id for example in examples}) == 6


def test_essays_come_from_a_file_or_from_the_grammar(tmp_path):
    path = tmp_path / "essay.txt"
    path.write_text('One day\nit rained. "Did it?" he asked. It did!  And so on', encoding="utf-8")
    task = make_task("niah", subset="single_2", num_lines=4, data=str(path))
    assert task.examples("all", 1, 0)[0].lines == ("One day it rained.", '"Did it?"', "he asked.", "It did!")
    with pytest.raises(UserError, match="essay.txt has 5 sentences; use --num-lines 5 or less"):
        make_task("niah", subset="single_2", num_lines=6, data=path).examples("all", 1, 0)
    path.write_bytes(b"\xff\xfeO\0n\0e\0")
    with pytest.raises(UserError, match="essay.txt: not readable as UTF-8 text .*UTF-16"):
        make_task("niah", subset="single_2", num_lines=1, data=path).examples("all", 1, 0)
    one, other = niah.Niah("single_2", num_lines=4).examples("all", 2, 0)
    assert one.lines != other.lines and all(line.startswith("The ") and line.endswith(".") for line in one.lines)


def test_generated_bytes_are_the_same_everywhere():
    found = []
    for name, settings in (
        ("niah", {"subset": "single_3", "num_lines": 2}),
        ("niah", {"subset": "multikey_2", "num_lines": 3}),
        ("vt", {"num_lines": 8, "num_chains": 2}),
        ("cwe", {"num_words": 12}),
        ("fwe", {"num_words": 120}),
    ):
        task = make_task(name, **settings)
        first, *_ = task.examples("test", 3, seed=5)
        assert task.examples("test", 1, seed=5) == [first] != task.examples("test", 1, seed=6)
        found.append(hashlib.sha256(task.prompt(first, 0).text.encode()).hexdigest()[:12])
    assert found == ["73341b01e017", "b853fcb157cf", "394bed8c9b26", "b0c9c0430810", "ce75f1ac2622"]


def test_search_and_test_share_nothing():
    for name, first in (
        ("niah", lambda example: example.needles[0][0]),
        ("vt", lambda example: example.chains[0].names[0]),
        ("cwe", lambda example: example.words[0]),
        ("fwe", lambda example: example.words[1]),
    ):
        for split in ("search", "test"):
            assert {split_of(first(example)) for example in make_task(name).examples(split, 12, seed=0)} == {split}


def test_a_chain_together_is_at_its_depth():
    task = variable_tracking.VariableTracking(num_lines=12, num_chains=2, placing="together")
    [example] = task.examples("all", 1, seed=0)
    chain = " ".join(example.chains[0].assignments)
    for line in (0, 6, 12):
        asked = task.prompt(example, line).text.rsplit("Memorize", 1)[1]
        before, found, behind = asked.partition(chain)
        assert found and before.count("The grass") == line and behind.count("The grass") == 12 - line
        assert example.chains[1].names[4] in asked


def test_words_together_stand_at_their_depth_and_as_often_as_spread():
    for spread, together in (
        (frequent_words.FrequentWords(200), frequent_words.FrequentWords(200, placing="together")),
        (common_words.CommonWords(14, True), common_words.CommonWords(14, True, "together")),
    ):
        [example] = spread.examples("all", 1, seed=0)
        assert spread.num_items == 1 and together.examples("all", 1, seed=0) == [example]
        golds = spread.prompt(example, 0).references

        def listed(task: Any, first_slot: int, example: Any = example) -> list[str]:
            asked = task.prompt(example, first_slot).text.rsplit("\nQuestion", 1)[0].split("\n")[-1]
            return re.sub(r"\d+\. ", "", asked.removeprefix("Read").partition("coded words. ")[2] or asked).split()

        for first_slot in (0, together.num_items // 2, together.num_items - 1):
            found = listed(together, first_slot)
            assert sorted(found) == sorted(listed(spread, 0))
            where = [number for number, word in enumerate(found) if word in golds]
            assert where == list(range(first_slot, first_slot + len(where)))


def test_ranges_of_lengths_keep_what_is_asked():
    for name, setting, low, high, more in (
        ("niah", "num_lines", 2, 30, {"subset": "near_keys"}),
        ("niah", "num_lines", 1, 9, {"subset": "multikey_3"}),
        ("vt", "num_lines", 5, 40, {"num_chains": 2}),
        ("cwe", "num_words", 10, 40, {}),
        ("fwe", "num_words", 60, 900, {"placing": "together"}),
    ):
        task = make_task(name, **{setting: high}, **more)
        ranged = Ranged(task, setting, low)
        for example, whole in zip(ranged.examples("test", 6, 0), task.examples("test", 6, 0), strict=True):
            short, long = ranged.prompt(example, 0, 100), task.prompt(whole, task.num_items - 1)
            assert set(short.references) == set(long.references)
            assert len(short.text) < len(long.text) or example.length == high


def test_answers_can_be_reached_by_a_tokenizer():
    bundled = lj.load_tokenizer("tiny-retriever")
    for name, settings in (
        ("niah", {"subset": "multiquery"}),
        ("vt", {"answer_opener": ""}),
        ("cwe", {}),
        ("fwe", {}),
        ("vt", {}),
    ):
        task = make_task(name, **settings)
        prompt = task.prompt(task.examples("all", 1, 0)[0], 0)
        for tokenizer in (bundled, words):
            if tokenizer is words and prompt.text.endswith(" "):  # it joins the space with what follows
                with pytest.raises(UserError, match="merges with the answer .* choose another --answer-opener"):
                    encode([prompt], tokenizer, 10**6)
            else:
                assert encode([prompt], tokenizer, 10**6)[0].answers


def test_own_words_are_distinct():
    every = ADJECTIVES + NOUNS + VERBS
    assert len(set(every)) == len(every) > 1400 and all(re.fullmatch("[a-z]+", word) for word in every)


def test_words_come_from_a_file(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("\n".join(f"w{n}x" for n in range(90)) + "\n\nw1x\n")
    task = make_task("cwe", data=path, num_words=60)
    [example] = task.examples("test", 1, 0)
    assert len(set(example.words)) == 60 and all(re.fullmatch(r"w\d+x", word) for word in example.words + example.shot)
    with pytest.raises(UserError, match="words.txt: 90 different words, but 91 are needed; use fewer --num-words"):
        make_task("cwe", data=path, num_words=91).examples("test", 1, 0)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("niah", {"subset": "single_4"}, "--subset 'single_4' is not a variant of --task niah, which are: single_1, "),
        ("niah", {"num_keys": 3}, "--num-keys: --subset single_1 has RULER's number of needles"),
        ("niah", {"subset": "multikey_1", "queries_per_haystack": 2}, "--queries-per-haystack above 1 is for"),
        (
            "niah",
            {"subset": "multikey_2", "queries_per_haystack": 4, "num_lines": 2},
            "from 1 to --num-lines .2.",
        ),
        ("niah", {"subset": "multikey_3", "queries_per_haystack": 3, "num_lines": 2}, "would ask about all lines"),
        ("niah", {"data": "essay.txt"}, "--data: the haystack of --subset single_1 is not an essay"),
        ("niah", {"subset": "single_2", "data": "no.txt"}, "--data no.txt: no such file; any text file"),
        ("niah", {"num_lines": -1}, "--num-lines must be at least 0"),
        ("vt", {"answer_opener": "x"}, "--answer-opener 'x': a prompt of --task vt ends in ' ' or in ''"),
        ("vt", {"num_lines": 0}, "--num-lines 0: has 0 pieces, too few for the 5 assignments"),
        ("vt", {"num_hops": 0}, "--num-hops must be at least 1"),
        ("cwe", {"num_words": 9}, "--num-words 9: a list has 10 common words"),
        ("cwe", {"num_words": 5000}, r"--num-words 5000: there are 1477 words; use fewer, or --data FILE"),
        ("fwe", {"num_words": 20}, "the third and the fourth word would occur equally often|use more words"),
        ("fwe", {"alpha": 1.0}, "--alpha must be above 1"),
    ],
)
def test_settings_that_cannot_be(name, settings, message):
    with pytest.raises(UserError, match=message) as refused:
        make_task(name, **settings)
    assert "\n" not in str(refused.value)
