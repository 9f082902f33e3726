"""Questions whose score says nothing are counted, and left out with --drop-leaky; golds that any output has are refused."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import lpes_jax as lj
from lpes_jax.compare import CompareSettings, run_comparison
from lpes_jax.evaluation import COUNTS
from lpes_jax.scoring import OptionScorer
from lpes_jax.tasks import make_task
from lpes_jax.tasks.chat import ChatTask
from lpes_jax.tasks.leaks import FAULTS, count_leaky
from lpes_jax.tasks.metrics import concordance, f1, rouge, says_nothing, substring
from lpes_jax.tasks.prompts import Prompt, short_answers

EMPTY, LEAK = FAULTS


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def kv(key: str, value: str, *others: tuple[str, str]) -> dict[str, Any]:
    return {"ordered_kv_records": [[key, value], *map(list, others)], "key": key, "value": value}


def mdqa(question: str, answers: list[str], *distractors: str) -> dict[str, Any]:
    gold = {"title": "gold", "text": f"here it stands: {' '.join(answers)}", "isgold": True}
    return {
        "question": question,
        "answers": answers,
        "ctxs": [gold, *({"title": "other", "text": text, "isgold": False} for text in distractors)],
    }


def faults(task: Any) -> list[tuple[str, ...]]:
    """Of each question of all splits, at its first slot."""
    return [task.prompt(example, 0).faults for example in task.examples("all", None, 0)]


# Key-value pairs


@pytest.mark.parametrize("opener", ["", " ", ' "', "'"])
@pytest.mark.parametrize("value", ["", " ", "\t", "\n ", "\u00a0"])
def test_pairs_without_a_value_are_refused(tmp_path, value, opener):
    path = write(tmp_path / "kv.jsonl", kv("a", "one", ("b", "two")), kv("b", value, ("a", "one")))
    with pytest.raises(lj.UserError, match="kv.jsonl, line 2: the value asked for is .*, which every output contains"):
        make_task("kv", data=path, num_pairs=2, answer_opener=opener).examples("all", None, 0)


def test_other_pairs_without_a_value_are_not_asked_for(tmp_path):
    others = [(f"k{number}", "" if number % 2 else f"v{number}") for number in range(40)]
    path = write(tmp_path / "kv.jsonl", kv("gold", "value", *others))
    task = make_task("kv", data=path, num_pairs=41, queries_per_haystack=4)
    for example in task.examples("all", None, 0):
        assert all(task.prompt(example, slot).gold for slot in range(41))


def test_pairs_that_give_the_answer_away(tmp_path):
    rows = [
        kv("a", "Blue", ("b", "green"), ("c", "red")),
        kv("b", "green", ("a", "light GREEN"), ("c", "red")),  # copying the wrong value is right, too
        kv("c", "red", ("the red key", "blue"), ("d", "x")),
        kv("d", '"', ("a", "blue"), ("c", "red")),
        kv("e", ", -", ("a", "blue"), ("c", "red")),
    ]
    task = make_task("kv", data=write(tmp_path / "kv.jsonl", *rows), num_pairs=3)
    assert faults(task) == [(), (LEAK,), (LEAK,), (EMPTY,), (EMPTY,)]
    assert faults(replace(task, num_pairs=1)) == [(), (), (), (EMPTY,), (EMPTY,)]  # nothing stands beside the fact


def test_generated_pairs_do_so_where_keys_are_short():
    for length, some in ((None, False), (8, False), (1, True)):
        task = make_task("kv", num_pairs=8, key_length=length)
        prompts = [task.prompt(example, 3) for example in task.examples("test", 50, 0)]
        leaky = [bool(prompt.faults) for prompt in prompts]
        texts = [prompt.text.replace(f'"{prompt.gold}"', "", 1).partition("Key:")[0] for prompt in prompts]
        assert any(leaky) is some
        if some:  # an answer of one digit, which another key or value is, too
            assert all(f'"{prompt.gold}"' in text for prompt, text, leak in zip(prompts, texts, leaky, strict=True) if leak)


# Documents


def test_documents_that_contain_the_answer_and_golds_of_which_nothing_is_left(tmp_path):
    rows = [
        mdqa("one", ["Paris"], "London lies on the Thames", "Rome"),
        mdqa("two", ["Paris"], "from Paris, with love", "Rome"),
        mdqa("three", ["The"], "nothing", "here"),
        mdqa("four", ["*", "Rome"], "nothing", "here"),
        mdqa("five", ["", "Rome"], "a roman", "Rome!"),
        mdqa("six", ["5"], "in 1950", "at 15"),  # short golds count at word ends only
        mdqa("seven", ["5"], "in 1950", "5 of them"),
        mdqa("eight", ["。"], "nothing", "here"),
    ]
    task = make_task("mdqa", data=write(tmp_path / "mdqa.jsonl", *rows), num_documents=3)
    expected = [(), (LEAK,), (EMPTY,), (EMPTY,), (EMPTY, LEAK), (), (LEAK,), ()]
    assert faults(task) == expected
    assert faults(replace(task, unicode_normalise=True)) == [*expected[:-1], (EMPTY,)]
    assert faults(replace(task, num_documents=2)) == [(), (LEAK,), (EMPTY,), (EMPTY,), (EMPTY,), (), (), ()]
    for mode in ("oracle", "closed_book"):  # nothing stands beside the fact
        assert faults(replace(task, mode=mode)) == [(EMPTY,) if EMPTY in marks else () for marks in expected]
    empty = [task.prompt(example, 0) for example in task.examples("all", None, 0) if EMPTY in task.prompt(example, 0).faults]
    assert all(task.score("anything", prompt)["best_subspan_em_original"] == 1 for prompt in empty)  # that is why
    assert [prompt.answers for prompt in empty] == [(" The",), (" *", " Rome"), (" Rome",)]  # none is blank


def test_drawn_documents_never_contain_the_answer(tmp_path):
    rows = [mdqa(f"question {number}", [f"answer {'twin' if number % 3 else number}"]) for number in range(40)]
    path = write(tmp_path / "mdqa.jsonl", *rows)
    for queries in (1, 2):
        task = make_task("mdqa", data=path, num_documents=3, distractors="random", queries_per_haystack=queries)
        prompts = [task.prompt(example, slot) for example in task.examples("all", None, 0) for slot in range(3)]
        assert prompts and not any(prompt.faults for prompt in prompts)


# Long documents, multiple choice


def scrolls(output: str) -> dict[str, Any]:
    return {"id": output, "input": f"A text. {output}?", "output": output, "truncation_seperator": "..."} | {
        "document_start_index": 0,
        "query_start_index": 7,
    }


@pytest.mark.parametrize("subset, empty", [("qasper", ["", "the", "!?"]), ("gov_report", ["", "!?", "摘要"])])
def test_golds_of_long_documents(tmp_path, subset, empty):
    rows = [scrolls(output) for output in ("an answer", *empty)]
    task = make_task("zero_scrolls", data=write(tmp_path / "z.jsonl", *rows), subset=subset)
    assert faults(task) == [(), *[(EMPTY,)] * len(empty)]
    rows = [{"instructions": [f"{output}?" for output in ("an answer", *empty)], "outputs": ["an answer", *empty]}]
    rows[0] |= {"input": "A text.", "evaluation": "f1" if subset == "qasper" else "rouge"}
    l_eval = "narrative_qa" if subset == "qasper" else "news_summ"
    task = make_task("l_eval", data=write(tmp_path / "l.jsonl", *rows), subset=l_eval)
    assert faults(task) == [(), *[(EMPTY,)] * len(empty)]
    for example in task.examples("all", None, 0)[1:]:
        assert all(
            score == 0 for output in ("", "the", "A text.") for score in task.score(output, task.prompt(example, 0)).values()
        )


def test_one_of_several_references_is_enough(tmp_path):
    rows = [{**scrolls("an answer"), "output": output} for output in ("the", "an answer")]
    task = make_task("zero_scrolls", data=write(tmp_path / "z.jsonl", *rows), subset="qasper")
    assert faults(task) == [()]


@pytest.mark.parametrize("output", ["", "none", "a, b"])
def test_an_order_of_nothing_would_be_every_outputs(tmp_path, output):
    assert concordance("I do not know", output) == 1
    path = write(tmp_path / "z.jsonl", scrolls("2, 1, 3"), scrolls(output))
    with pytest.raises(lj.UserError, match="line 2: the output .* has no numbers to sort"):
        make_task("zero_scrolls", data=path, subset="book_sum_sort").examples("all", None, 0)


def test_a_percentage_beyond_all_numbers_is_none(tmp_path):
    path = write(tmp_path / "z.jsonl", scrolls("9" * 400 + "%"))
    with pytest.raises(lj.UserError, match="is not a percentage"):
        make_task("zero_scrolls", data=path, subset="space_digest").examples("all", None, 0)


def choices(tmp_path: Path, *rows: str) -> Any:
    (tmp_path / "test").mkdir(exist_ok=True)
    (tmp_path / "test" / "x_test.csv").write_text("".join(f"{row}\n" for row in rows))
    return make_task("mmlu", data=tmp_path, num_shots=0)


def test_choices_that_are_the_same(tmp_path):
    task = choices(tmp_path, "q1,a,b,c,d,B", "q2,a,b, b,d,B", "q3,a,a,c,d,D", "q4,a,,c,d,B", "q5,,x,,d,A", "q6,Aa,AA,aa,b,A")
    assert faults(task) == [(), (LEAK,), (), (EMPTY,), (EMPTY, LEAK), ()]


def test_options_that_are_the_same_tokens_are_refused(tmp_path, tiny_model):
    task = choices(tmp_path, "q1,a,b,c,d,B")
    prompts = [task.prompt(example, 0) for example in task.examples("all", None, 0)]
    words = Tokenizer(models.WordLevel({"<unk>": 0, "A": 1, "B": 2, "C": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    OptionScorer(tiny_model, PreTrainedTokenizerFast(tokenizer_object=words), prompts)  # D is the one that it does not know
    words = Tokenizer(models.WordLevel({"<unk>": 0, "A": 1, "B": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(lj.UserError, match="two of the options ' A', ' B', ' C', ' D' are the same tokens in this tokenizer"):
        OptionScorer(tiny_model, PreTrainedTokenizerFast(tokenizer_object=words), prompts)


# Any gold: what says nothing has no score but 0


@given(st.text(max_size=12), st.text(max_size=12))
def test_what_says_nothing_has_nothing_in_common_with_any_output(gold, output):
    if says_nothing(gold, "f1"):
        assert f1(output, [gold]) == f1("the " + output, [gold]) == 0
    else:
        assert f1(gold, [gold]) == 1
    if says_nothing(gold, "rouge"):
        assert rouge(output, [gold])["rouge1"] == 0
    else:
        assert rouge(gold, [gold])["rouge1"] == 1
    if not gold.strip():
        assert substring(f"a {output}{gold} b", gold)


def prompt(example: str, *faults: str, answers: tuple[str, ...] = (" x",)) -> Prompt:
    return Prompt("q", answers, "x", example, 0, 0, 1, faults=faults)


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.sampled_from(FAULTS), max_size=2)), max_size=20), st.booleans())
def test_counts_are_of_questions(asked, drop):
    prompts = [prompt(str(example), *found) for example, found in asked]
    by_question: dict[str, set[str]] = {}
    for marked in prompts:
        by_question.setdefault(marked.example, set()).update(marked.faults)
    good = {example for example, found in by_question.items() if not found}
    if prompts and drop and not good:
        with pytest.raises(lj.UserError, match=f"--drop-leaky drops all {len(by_question)} questions"):
            count_leaky(prompts, drop)
        return
    kept, counts = count_leaky(prompts, drop)
    assert kept == [marked for marked in prompts if not drop or marked.example in good]
    assert counts.pop("questions_dropped") == (len(by_question) - len(good) if drop else 0)
    assert Counter({name: count for name, count in counts.items() if count}) == Counter(
        f"questions_{fault}" for found in by_question.values() for fault in found
    )


def test_answers_are_there_for_all_or_none():
    assert short_answers([prompt("a"), prompt("b")]) and not short_answers([prompt("a", answers=())])
    with pytest.raises(lj.UserError, match="1 questions have a blank gold answer.*--drop-leaky"):
        short_answers([prompt("a"), prompt("b", answers=()), prompt("b", answers=())])


def test_a_chat_keeps_what_was_found(tmp_path):
    task = make_task("mdqa", data=write(tmp_path / "m.jsonl", mdqa("one", ["*"], "x")), num_documents=2)
    chat = ChatTask(task, lambda text: f"USER: {text} ASSISTANT:")
    assert faults(chat) == [(EMPTY,)]


# Verbs


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten questions of which two contain their answer twice and two ask for nothing, in both splits."""
    rows = []
    for number in range(10):
        answers = ["*"] if number % 5 == 3 else [f"x{number:02d}"]
        rows.append(mdqa(f"rq{number}", answers, f"see x{number:02d}" if number % 5 == 0 else "n"))
    return write(tmp_path_factory.mktemp("questions") / "mdqa.jsonl", *rows)


def test_evaluate_counts_and_drops(questions, model_folder, tmp_path):
    settings = lj.EvaluateSettings.of(
        task="mdqa", data=questions, num_documents=2, split="all", limit=10, positions=(0, 100), model=str(model_folder),
        dtype="float32", metrics=("best_subspan_em",), max_new_tokens=6, output_path=tmp_path / "all",
    )  # fmt: skip
    [everything] = lj.run_evaluation(settings)
    assert everything.counts["questions_gold_empty"] == 2 and everything.counts["questions_answer_in_distractors"] == 2
    assert everything.counts["questions_dropped"] == 0 and len(everything.main) == 10
    [kept] = lj.run_evaluation(settings.replace(drop_leaky=True, output_path=tmp_path / "kept"))
    assert kept.counts["questions_dropped"] == 4 and len(kept.main) == 6
    record = json.loads((tmp_path / "kept" / "results.json").read_text())
    assert record["n-samples"]["mdqa"] == {"original": 10, "effective": 6} and record["config"]["drop_leaky"] is True
    figures = record["methods"]["baseline"]
    assert {name: figures[name] for name in COUNTS if name.startswith("questions_")} == {
        **{"questions_skipped": 0, "questions_gold_empty": 2, "questions_answer_in_distractors": 2, "questions_dropped": 4}
    }
    assert {"outputs_empty", "outputs_ended_by_length"} <= figures.keys()
    # Those that stay are measured as they were among the others.
    lines = [json.loads(line) for line in (tmp_path / "all" / "samples.jsonl").read_text().splitlines()]
    good = [line for line in lines if "faults" not in line]
    bad = {line["example"] for line in lines} - {line["example"] for line in good}
    assert len(bad) == 4 and len(good) == 12
    assert good == [json.loads(line) for line in (tmp_path / "kept" / "samples.jsonl").read_text().splitlines()]
    np.testing.assert_array_equal(kept.main.ravel(), [line["best_subspan_em"] for line in good])


@pytest.mark.long
def test_a_search_and_a_comparison_drop_them_too(questions, model_folder, tmp_path):
    few = {
        "task": "mdqa", "data": questions, "num_documents": 2, "positions": (0, 100), "model": str(model_folder),
        "dtype": "float32", "max_new_tokens": 6, "metrics": ("prefix",), "drop_leaky": True,
    }  # fmt: skip
    task = make_task("mdqa", data=questions, num_documents=2)
    splits = {split: task.examples(split, None, 0) for split in ("search", "test")}
    bad = {split: sum(bool(task.prompt(example, 0).faults) for example in examples) for split, examples in splits.items()}
    assert all(bad.values())
    limits = {"limit": len(splits["search"]), "test_limit": len(splits["test"])}
    result = lj.run_search(
        lj.preset(
            "default",
            **few,
            **limits,
            algorithm="random",
            population_size=2,
            max_evaluations=2,
            uniform_candidates=1,
            search_positions=(0, 100),
            weights=(0.5, 0.5),
            control_points=2,
            output_path=tmp_path / "run",
        )  # fmt: skip
    )
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert record["selection"]["search_questions"]["questions_dropped"] == bad["search"]
    assert result.outcomes[0].counts["questions_dropped"] == bad["test"]
    assert len(result.outcomes[0].main) == limits["test_limit"] - bad["test"]
    record = run_comparison(
        CompareSettings.of(**few, **limits, methods=("uniform",), budget=2, repeats=1, output_path=tmp_path / "compared")
    )
    assert {entry["questions_dropped"] for entry in record["methods"].values()} == {bad["test"]}


def test_blank_golds_have_no_beginning(model_folder, tmp_path):
    path = write(tmp_path / "z.jsonl", *(scrolls(output) for output in ("yes", " ", "no", "maybe")))
    settings = lj.EvaluateSettings.of(
        task="zero_scrolls", subset="qasper", data=path, split="all", limit=4, model=str(model_folder), dtype="float32",
        metrics=("prefix",), max_prompt_tokens=64, output_path=tmp_path / "out",
    )  # fmt: skip
    with pytest.raises(
        lj.UserError, match="1 questions have a blank gold answer, with which every output begins; .*--drop-leaky"
    ):
        lj.run_evaluation(settings)
    assert not (tmp_path / "out").exists()
    [outcome] = lj.run_evaluation(settings.replace(drop_leaky=True))
    assert len(outcome.main) == 3
    blank = write(tmp_path / "blank.jsonl", *(scrolls(" " * count) for count in (1, 2)))
    with pytest.raises(lj.UserError, match="--metrics prefix: --task zero_scrolls has no short answers"):
        lj.run_evaluation(settings.replace(data=blank, limit=2, output_path=tmp_path / "none"))
    with pytest.raises(lj.UserError, match="--drop-leaky drops all 2 questions"):
        lj.run_evaluation(settings.replace(data=blank, limit=2, drop_leaky=True, output_path=tmp_path / "none"))
