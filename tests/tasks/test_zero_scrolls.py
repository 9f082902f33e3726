"""ZeroSCROLLS: the file's own prompts, several references, the cut that keeps the query, and each subset's metric."""

import json
import re

import pytest
from word_tokenizer import num_words, words

from lpes_jax.errors import UserError
from lpes_jax.tasks import make_task
from lpes_jax.tasks.metrics import corpus_rouge
from lpes_jax.tasks.prompts import Task, fit
from lpes_jax.tasks.zero_scrolls import METRICS, ZeroScrolls

INSTRUCTION, QUERY, SEPARATOR = "Answer it.\n\n", "Question:\nWhy so?\n\nAnswer:\n", "... [omitted]\n\n"


def row(id: str, output: str, document: str = "one two three four five six seven eight") -> dict:
    text = f"{INSTRUCTION}{document}\n\n{QUERY}"
    start = len(INSTRUCTION)
    end = start + len(document)
    return {
        "id": id,
        "pid": f"{id}_0",
        "input": text,
        "output": output,
        "document_start_index": start,
        "document_end_index": end,
        "query_start_index": end + 2,
        "query_end_index": len(text),
        "truncation_seperator": SEPARATOR,
    }


def test_lines_of_one_id_are_references_of_one_prompt(rows_file):
    data = rows_file(row("a", "first"), row("b", "other", "ten"), row("a", "second"))
    task = ZeroScrolls("qasper", data)
    first, second = task.examples("all", None, 0)
    prompt = task.prompt(first, 0)
    assert isinstance(task, Task) and (task.max_prompt_tokens, task.max_new_tokens) == (3584, 512)
    assert prompt.text == row("a", "")["input"]
    assert prompt.references == ("first", "second") and prompt.answers == ("first", "second")  # behind "Answer:\n"
    assert task.score("the second", prompt) == {"f1": 1}
    assert task.prompt(second, 0).references == ("other",)


@pytest.mark.parametrize(
    "subset, golds, output, scores",
    [
        ("gov_report", ["one two three four"], "one two", {"rouge1": 2 / 3, "rouge2": 0.5, "rougeL": 2 / 3}),
        ("squality", ["two one", "one two three four"], "one two", {"rouge1": 1, "rouge2": 0.5, "rougeL": 2 / 3}),
        ("narrative_qa", ["nothing", "the grey dog"], "a dog", {"f1": 2 / 3}),
        ("quality", ["(B) It was."], "B", {"accuracy": 1}),
        ("quality", ["(B) It was."], "C or B", {"accuracy": 0}),
        ("quality", ["(B) It was."], "none", {"accuracy": 0}),
        ("space_digest", ["70%"], "60%", {"exponential_similarity": 0.5}),
        ("book_sum_sort", ["2, 1, 3"], "2, 3, 1", {"concordance": 2 / 3}),
        ("book_sum_sort", ["2, 1, 3"], "2, 3", {"concordance": 0}),
    ],
)
def test_scores_by_hand(rows_file, subset, golds, output, scores):
    task = make_task("zero_scrolls", subset=subset, data=rows_file(*(row("a", gold) for gold in golds)))
    [example] = task.examples("all", None, 0)
    found = task.score(output, task.prompt(example, 0))
    assert tuple(found) == task.metrics
    if "rouge1" in scores:
        assert found.pop("rouge") == pytest.approx((scores["rouge1"] * scores["rouge2"] * scores["rougeL"]) ** (1 / 3))
    assert found == pytest.approx(scores)
    assert task.prompt(example, 0).answers == (() if METRICS[subset] == "rouge" else tuple(golds))


def test_a_long_document_loses_its_end_and_the_query_stays(rows_file):
    task = ZeroScrolls("gov_report", rows_file(row("a", "x"), row("b", "x", "short")))
    prompts = [task.prompt(example, 0) for example in task.examples("all", None, 0)]
    assert [num_words(prompt.text) for prompt in prompts] == [15, 8]
    fitted = fit(prompts, words, 100, max_prompt_tokens=13)
    assert (fitted.num_cut, fitted.skipped) == (1, [])
    assert fitted.prompts[0].was_cut and not fitted.prompts[1].was_cut and fitted.prompts[1] == prompts[1]
    assert re.fullmatch(
        r"Answer it\.\n\none two three four f?i?v?e?\.\.\. \[omitted\]\n\nQuestion:\nWhy so\?\n\nAnswer:\n",
        fitted.prompts[0].text,
    )
    assert num_words(fitted.prompts[0].text) == 13
    # The window less what is generated counts too, and the instruction and the query are never cut.
    assert num_words(fit(prompts, words, 111, max_prompt_tokens=13, new_tokens=100).prompts[0].text) == 11
    with pytest.raises(UserError, match="1 questions are too long: up to 9 tokens"):
        fit(prompts[:1], words, 100, max_prompt_tokens=6)


def test_documents_are_split_with_all_their_questions(rows_file):
    rows = [row(f"{document} {question}", "x", f"document {document}") for document in range(30) for question in range(3)]
    task = ZeroScrolls("qasper", rows_file(*rows))
    search, test = ({example.document for example in task.examples(split, None, 0)} for split in ("search", "test"))
    assert search and test and not search & test and len(search | test) == 30


def test_qmsum_from_its_own_files(rows_file):
    meeting = {
        "meeting_transcripts": [{"speaker": "Ann", "content": "Hello {you} ."}, {"speaker": "Bob", "content": "Yes ."}],
        "general_query_list": [{"query": "What of it?", "answer": "A greeting."}],
        "specific_query_list": [{"query": "Who?", "answer": "Ann.", "relevant_text_span": []}],
    }
    task = ZeroScrolls("qmsum", rows_file(meeting))
    first, second = task.examples("all", None, 0)
    head = (
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n"
    )
    assert task.prompt(first, 0).text == f"{head}Ann: Hello {{you}} .\nBob: Yes .\n\nQuery:\nWhat of it?\n\nAnswer:\n"
    assert first.document == second.document == "Ann: Hello {you} .\nBob: Yes ."
    assert second.references == ("Ann.",)
    with pytest.raises(UserError, match="line 1: not a QMSum meeting"):
        ZeroScrolls("qmsum", rows_file({**meeting, "general_query_list": [{}]})).examples("all", None, 0)


@pytest.mark.parametrize(
    "subset, bad, message",
    [
        ("qasper", {"id": "a"}, "line 2: not a ZeroSCROLLS row .*without input, output"),
        (
            "qasper",
            {**row("b", "x"), "output": None},
            "line 2: not a ZeroSCROLLS row with references .*its test split has none",
        ),
        ("qasper", {**row("b", "x"), "query_start_index": 999}, "line 2: not a ZeroSCROLLS row"),
        ("qasper", row("a", "x", "another document"), "line 2: the id 'a' is used in an earlier line with another input"),
        ("quality", row("b", "yes"), "line 2: the output 'yes' names no letter"),
        ("space_digest", row("b", "much"), "line 2: the output 'much' is not a percentage; is this a file of space_digest"),
    ],
)
def test_bad_lines_are_named(rows_file, subset, bad, message):
    with pytest.raises(UserError, match=message):
        ZeroScrolls(subset, rows_file(row("a", "A 1%"), bad)).examples("all", None, 0)


def test_settings_that_cannot_be(rows_file):
    with pytest.raises(UserError, match="--subset 'musique' is not in ZeroSCROLLS; its supported tasks are: gov_report, "):
        ZeroScrolls("musique", rows_file(row("a", "x")))
    with pytest.raises(UserError, match="--data is needed: the validation files are in tau/zero_scrolls"):
        ZeroScrolls("qasper")


@pytest.mark.parametrize("subset", ["gov_report", "book_sum_sort"])
def test_the_original_files(real, subset):
    path = real(f"zero_scrolls/{subset}_validation.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    task = ZeroScrolls(subset, path)
    examples = task.examples("all", None, 0)
    prompts = [task.prompt(example, 0) for example in examples]
    assert len(examples) == 20 and [prompt.text for prompt in prompts] == [row["input"] for row in rows]
    fitted = fit(prompts, words, 4096, max_prompt_tokens=task.max_prompt_tokens, new_tokens=task.max_new_tokens)
    lengths = [num_words(prompt.text) for prompt in prompts]
    assert fitted.num_cut == sum(length > 3584 for length in lengths) > 0
    for prompt, row, length in zip(fitted.prompts, rows, lengths, strict=True):
        query = row["truncation_seperator"] + row["input"][row["query_start_index"] :]
        if length > 3584:
            assert prompt.text.endswith(query) and row["input"].startswith(prompt.text[: -len(query)])
            assert 3580 <= num_words(prompt.text) <= 3584
        else:
            assert prompt.text == row["input"]
    perfect = [task.score(row["output"], prompt) for row, prompt in zip(rows[:5], prompts, strict=False)]
    assert all(score[task.metrics[0]] == pytest.approx(1) for score in perfect)
    if subset == "gov_report":
        assert corpus_rouge(perfect) == pytest.approx(1)


def test_the_original_qmsum(real):
    task = ZeroScrolls("qmsum", real("qmsum/ALL_val.jsonl"))
    examples = task.examples("all", None, 0)
    assert sum(len(example.references) for example in examples) == 272 and len({example.document for example in examples}) == 35
