"""Multi-document QA: the template's bytes, the place and number of the gold document, splits, distractors, scores."""

import gzip
import json
from dataclasses import replace

import pytest

from lpes_jax.errors import UserError
from lpes_jax.tasks import make_task
from lpes_jax.tasks.mdqa import Document, Example, MultiDocumentQA, question_split
from lpes_jax.tasks.metrics import contains, normalise
from lpes_jax.tasks.prompts import Task, slot

THREE = Example(
    question="who wrote it",
    answers=("Ann Lee", "A. Lee"),
    gold=Document("The {Book}", "It was written by Ann Lee."),
    distractors=(Document("First", "One text."), Document("Second", "Two\ntexts.")),
)
INSTRUCTION = (
    "Write a high-quality answer for the given question using only the provided search results (some of which might be "
    "irrelevant)."
)
MIDDLE = f"""\
{INSTRUCTION}

Document [1](Title: First) One text.
Document [2](Title: The {{Book}}) It was written by Ann Lee.
Document [3](Title: Second) Two
texts.

Question: who wrote it
Answer:"""


def row(number: int, documents: int = 3, answer: str | None = None) -> dict:
    answer = answer or f"answer{number}x"
    gold = {"title": f"gold {number}", "text": f"here is {answer}.", "hasanswer": True, "isgold": True}
    others = [
        {
            "title": f"other {number}",
            "text": f"text {other}",
            "isgold": False,
            "hasanswer": False,
            "id": str(other),
            "score": "1.5",
        }
        for other in range(documents - 1)
    ]
    return {"question": f"question {number}", "answers": [answer], "ctxs": [gold, *others], "nq_annotated_gold": {}}


@pytest.fixture
def three(rows_file):
    return MultiDocumentQA(rows_file(row(0)), num_documents=3)


def test_whole_prompt_byte_for_byte(three):
    prompt = three.prompt(THREE, 1)
    assert prompt.text == MIDDLE
    assert (prompt.position, prompt.slot, prompt.num_items) == (50, 1, 3)
    assert prompt.answers == (" Ann Lee", " A. Lee") and prompt.references == ("Ann Lee", "A. Lee")
    assert isinstance(three, Task)


def test_gold_moves_and_documents_are_numbered_as_they_stand(three):
    for percent, gold_slot in ((0, 0), (50, 1), (100, 2)):
        lines = three.prompt(THREE, slot(percent, 3)).text.split("\n\n")[1].replace("Two\n", "Two ").split("\n")
        assert [line.partition("]")[0] for line in lines] == ["Document [1", "Document [2", "Document [3"]
        titles = [line.partition("(Title: ")[2].partition(")")[0] for line in lines]
        assert titles.pop(gold_slot) == "The {Book}" and titles == ["First", "Second"]
    assert len({three.prompt(THREE, gold_slot).example for gold_slot in range(3)}) == 1
    with pytest.raises(UserError, match="--slots.*0 to 2"):
        three.prompt(THREE, 3)


def test_the_other_templates(rows_file):
    data = rows_file(row(0))
    aware = MultiDocumentQA(data, num_documents=3, query_aware=True).prompt(THREE, 1).text
    assert aware == MIDDLE.replace(f"{INSTRUCTION}\n\n", f"{INSTRUCTION}\n\nQuestion: who wrote it\n\n")
    shuffled = MultiDocumentQA(data, num_documents=3, random_order=True)
    assert shuffled.prompt(THREE, 1).text == MIDDLE.replace(
        INSTRUCTION, f"{INSTRUCTION} The search results are ordered randomly."
    )
    closed, oracle = (MultiDocumentQA(data, mode=mode) for mode in ("closed_book", "oracle"))
    [example] = closed.examples("all", None, 0)
    assert closed.num_items == oracle.num_items == 1
    assert closed.prompt(example, 0).text == "Question: question 0\nAnswer:"
    assert oracle.prompt(example, 0).text == (
        f"{INSTRUCTION}\n\nDocument [1](Title: gold 0) here is answer0x.\n\nQuestion: question 0\nAnswer:"
    )


def test_random_order_shuffles_the_distractors_by_the_seed(rows_file):
    task = MultiDocumentQA(rows_file(row(0, 8)), num_documents=8, random_order=True)
    orders = [[document.text for document in task.examples("all", None, seed)[0].distractors] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == [f"text {number}" for number in range(7)]


@pytest.mark.parametrize(
    "output, em, bounded, original, f1",
    [
        (" Ann Lee.", 1, 1, 1, 1),
        ("\n\nAnn Lee", 1, 1, 0, 1),  # the original cuts at the first line end, and then strips
        ("It was\nAnn Lee", 0, 0, 0, 0),
        ("ann  lee wrote the book", 1, 1, 1, 2 / 3),
        ("Leeds", 1, 0, 1, 0),  # "A. Lee" is "lee", and that is inside
        ("Lee", 1, 1, 1, 1),
        ("Ann", 0, 0, 0, 2 / 3),
        ("", 0, 0, 0, 0),
    ],
)
def test_scores(three, output, em, bounded, original, f1):
    scores = three.score(output, three.prompt(THREE, 0))
    substrings = {"best_subspan_em": em, "best_subspan_em_bounded": bounded, "best_subspan_em_original": original}
    assert scores == substrings | {"f1": pytest.approx(f1)}
    assert tuple(scores) == three.metrics


def test_scoring_by_other_rules(rows_file):
    data = rows_file(row(0))
    star = Example("q", ("*", "Beyoncé"), Document("t", "x"), ())
    for settings, output, right in (
        ({}, "anything", 0),
        ({"empty_golds_match": True}, "anything", 1),
        ({}, "Beyonce", 0),
        ({"unicode_normalise": True}, "“Beyonce”", 1),
        ({}, "\nBeyoncé", 1),
        ({"first_line": "original"}, "\nBeyoncé", 0),
        ({}, "one\nBeyoncé", 0),
        ({"first_line": "all"}, "one\nBeyoncé", 1),
    ):
        task = MultiDocumentQA(data, mode="oracle", **settings)
        assert task.score(output, task.prompt(star, 0))["best_subspan_em"] == right, (settings, output)
    assert task.score("anything", task.prompt(star, 0))["best_subspan_em_original"] == 1
    assert task.score("x\nBeyoncé", task.prompt(star, 0))["f1"] == pytest.approx(2 / 3)  # both lines: first_line="all"


def test_fewer_documents_than_the_file_has_are_gold_and_the_first_others(rows_file):
    [example] = MultiDocumentQA(rows_file(row(7, 10)), num_documents=3).examples("all", 1, 0)
    assert example.gold == Document("gold 7", "here is answer7x.", "0")
    assert example.distractors == (Document("other 7", "text 0", "0"), Document("other 7", "text 1", "1"))


def test_the_split_is_by_question_in_every_file(rows_file):
    rows = [row(number) for number in range(60)]
    first = MultiDocumentQA(rows_file(*rows), num_documents=3)
    reworded = [{**row(number, 5), "question": f"The  Question, {number}?"} for number in reversed(range(60))]
    second = MultiDocumentQA(rows_file(*reworded, name="other.jsonl"), num_documents=5)
    search = {normalise(example.question) for example in first.examples("search", None, 0)}
    test = {normalise(example.question) for example in second.examples("test", None, 1)}
    assert len(search) + len(test) == 60 and not search & test
    assert len(test) == len(first.examples("test", None, 0))
    with pytest.raises(UserError, match=f"61 examples asked for, its 'test' split has {len(test)}; .*--split all"):
        first.examples("test", 61, 0)


def test_random_distractors_contain_no_answer_and_stay_when_more_are_asked_for(rows_file):
    rows = [row(number, 1, answer="1" if number % 9 == 0 else None) for number in range(90)]
    rows[5]["answers"] = ["*"]  # normalises to nothing: excludes nothing
    rows[8]["ctxs"][0]["text"] = rows[7]["ctxs"][0]["text"]
    data = rows_file(*rows)
    task = MultiDocumentQA(data, num_documents=5, distractors="random")
    examples = task.examples("all", None, seed=0)
    for example in examples:
        texts = [normalise(f"{document.title} {document.text}") for document in example.distractors]
        assert len({example.gold.text, *(document.text for document in example.distractors)}) == 5
        assert not any(
            contains(text, normalise(answer), len(answer) < 3) for text in texts for answer in example.answers if answer != "*"
        )
        splits = {question_split(f"question {document.title.split()[1]}") for document in (example.gold, *example.distractors)}
        assert splits == {question_split(example.question)}
        assert task.prompt(example, 0).details == {
            "distractors": [document.title.split()[1] for document in example.distractors]
        }
    more = MultiDocumentQA(data, num_documents=9, distractors="random").examples("all", None, seed=0)
    assert [example.distractors for example in examples] == [example.distractors[:4] for example in more]
    assert (
        task.examples("search", 3, seed=0)
        == [example for example in examples if question_split(example.question) == "search"][:3]
    )
    assert task.examples("all", None, seed=1) != examples
    with pytest.raises(UserError, match=r"--num-documents 90: only \d+ other passages of the '(search|test)' split"):
        MultiDocumentQA(data, num_documents=90, distractors="random").examples("all", None, seed=0)


def test_questions_of_a_haystack_share_all_but_their_ends(rows_file):
    task = MultiDocumentQA(rows_file(*map(row, range(120))), num_documents=5, distractors="random", queries_per_haystack=3)
    examples, met = task.examples("search", 12, 0), set()
    assert examples == task.examples("search", 12, 0) != task.examples("search", 12, 1)
    for start in range(0, 12, 3):
        prompts = [
            task.prompt(example, slot(percent, 5), percent)
            for example in examples[start : start + 3]
            for percent in (0, 50, 100)
        ]
        assert [prompt.slot for prompt in prompts] == [0, 2, 4, 1, 1, 3, 2, 3, 2]  # the nearest, then its neighbours
        assert len({prompt.example for prompt in prompts}) == 3
        [documents] = {prompt.text.partition("\n\nQuestion: ")[0] for prompt in prompts}
        golds = [line.partition("(Title: gold ")[2].partition(")")[0] for line in documents.split("\n\n")[1].split("\n")]
        assert len(set(golds)) == 5 and not met & set(golds)
        met |= set(golds)
        for prompt in prompts:
            assert prompt.text.endswith(f"\n\nQuestion: question {golds[prompt.slot]}\nAnswer:")
            assert prompt.gold == f"answer{golds[prompt.slot]}x" and documents.count(prompt.gold) == 1
    assert {question_split(f"question {number}") for number in met} == {"search"}
    assert {example.id for example in task.examples("test", None, 0)} < {
        example.id for example in task.examples("all", None, 0)
    }


def test_a_haystack_has_no_answer_to_another_question_of_its_own(rows_file):
    rows = [row(number, answer="twin" if number % 2 else None) for number in range(60)]
    task = MultiDocumentQA(rows_file(*rows), num_documents=3, distractors="random", queries_per_haystack=2)
    examples = task.examples("all", None, 0)
    assert examples and all(sum("twin" in row.answers for row in example.haystack) <= 1 for example in examples)
    splits = [question_split(example.haystack[0].question) for example in examples]
    assert set(splits[:10]) == {"search", "test"}  # not one behind the other
    with pytest.raises(UserError, match="--num-documents 50: the passages of the 'test' split of .* form no haystack"):
        replace(task, num_documents=50).examples("test", 1, 0)


@pytest.mark.parametrize(
    "bad, message",
    [
        ("{not json", "line 2: not a lost-in-the-middle row.*not JSON"),
        ({"question": "q", "ctxs": []}, "line 2: not a lost-in-the-middle row .*without answers"),
        ({"question": "q", "answers": [], "ctxs": row(1)["ctxs"]}, "line 2: not a lost-in-the-middle row"),
        ({"question": "q", "answers": "yes", "ctxs": row(1)["ctxs"]}, "line 2: not a lost-in-the-middle row"),
        ({"question": "q", "answers": [1], "ctxs": row(1)["ctxs"]}, "line 2: not a lost-in-the-middle row"),
        ({**row(1), "ctxs": row(1)["ctxs"][1:]}, "line 2: not a lost-in-the-middle row"),  # no gold
        ({**row(1), "ctxs": row(1)["ctxs"][:1] * 3}, "line 2: not a lost-in-the-middle row"),  # three
        ({**row(1), "ctxs": [{"title": "t"}]}, "line 2: not a lost-in-the-middle row"),
        (row(1, 2), "line 2: 2 documents, but --num-documents is 3; use at most 2, or --distractors random"),
        ({**row(1), "question": "Question 0?"}, "line 2: the question 'Question 0\\?' is in an earlier line"),
    ],
)
def test_bad_lines_are_named(rows_file, bad, message):
    with pytest.raises(UserError, match=message) as raised:
        MultiDocumentQA(rows_file(row(0), bad), num_documents=3).examples("all", None, 0)
    assert "\n" not in str(raised.value)


def test_settings_that_cannot_be(rows_file):
    data = rows_file(row(0))
    for settings, message in (
        ({}, "--data is needed: the files are in nelson-liu"),
        ({"data": "nowhere.jsonl"}, "--data nowhere.jsonl: no such file; the files are in nelson-liu"),
        ({"data": data, "num_documents": 0}, "--num-documents must be at least 1, got 0"),
        ({"data": data, "query_aware": True, "random_order": True}, "no prompt with both"),
        (
            {"data": data, "num_documents": 2, "distractors": "random", "queries_per_haystack": 2},
            "from 1 to one below --num-documents",
        ),
        ({"data": data, "queries_per_haystack": 2}, "--queries-per-haystack above 1 needs --distractors random"),
        ({"data": data, "num_pairs": 5}, "--num-pairs is not a setting of --task mdqa, which has: --data, --num-documents"),
    ):
        with pytest.raises(UserError, match=message):
            make_task("mdqa", **settings)


# The real files


def original_prompt(row: dict, gold_slot: int) -> str:
    """As lost-in-the-middle writes it, of a file with the gold document first."""
    documents = [(ctx["title"], ctx["text"]) for ctx in row["ctxs"]]
    documents.insert(gold_slot, documents.pop(0))
    text = INSTRUCTION + "\n\n"
    for number, (title, passage) in enumerate(documents):
        text += f"Document [{number + 1}](Title: {title}) {passage}\n"
    return text + f"\nQuestion: {row['question']}\nAnswer:"


@pytest.mark.parametrize(
    "name, documents, rows, search",
    [
        ("mdqa10_first200.jsonl", 10, 200, 154),
        ("mdqa10_union_rows_0000_0499.jsonl", 10, 271, 213),
        ("mdqa20_misc70.jsonl", 20, 70, 58),
    ],
)
def test_the_original_files(real, name, documents, rows, search):
    path = real(f"mdqa/{name}")
    task = MultiDocumentQA(path, num_documents=documents)
    examples = task.examples("all", None, 0)
    assert len(examples) == len({example.id for example in examples}) == rows
    assert len(task.examples("search", None, 0)) == search
    originals = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for example, original in zip(examples, originals, strict=True):
        for percent in (0, 50, 100):
            gold_slot = slot(percent, documents)
            assert task.prompt(example, gold_slot).text == original_prompt(original, gold_slot)
        assert task.score(original["ctxs"][0]["text"], task.prompt(example, 0))["best_subspan_em"] == 1


def test_random_distractors_from_the_original_file(real):
    path = real("mdqa/nq-open-oracle.jsonl.gz")
    task = MultiDocumentQA(path, num_documents=10, distractors="random")
    examples = task.examples("all", None, 0)
    search, test = (
        [example for example in examples if question_split(example.question) == split] for split in ("search", "test")
    )
    assert (len(search), len(test)) == (2091, 564)  # Appendix C wants 2,000, the paper measures on 500
    assert not {example.question for example in search} & {example.question for example in test}
    assert not {document.text for example in search for document in example.distractors} & {
        example.gold.text for example in test
    }
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    for example in test[:100]:
        prompt = task.prompt(example, 4)
        chosen = [rows[int(number)] for number in prompt.details["distractors"]]
        assert [(row["ctxs"][0]["title"], row["ctxs"][0]["text"]) for row in chosen] == [
            (row.title, row.text) for row in example.distractors
        ]
        golds = [normalise(answer) for answer in example.answers]
        for row in chosen:
            text = normalise(row["ctxs"][0]["text"])
            assert not any(contains(text, gold, len(gold) < 3) for gold in golds if gold)
