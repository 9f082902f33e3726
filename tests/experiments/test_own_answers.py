"""The file of own answers: what the bundled model answers, where that is right, in the form that a search reads."""

import json
import sys
from pathlib import Path

import pytest

import lpes_jax as lj
from lpes_jax.errors import UserError
from lpes_jax.tasks.mdqa import MultiDocumentQA, question_split
from lpes_jax.tasks.metrics import first_line

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
import own_answers  # noqa: E402

MODEL = "tiny-retriever"


def questions(split: str, count: int) -> list[str]:
    """The first questions of a split."""
    named = (f"what is number {number}" for number in range(1000))
    return [question for question in named if question_split(question) == split][:count]


def row(question: str, answer: str) -> dict:
    return {"question": question, "answers": [answer], "ctxs": [{"title": "T", "text": f"{question}: 5", "isgold": True}]}


def file_of(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in rows), encoding="utf-8")
    return path


def test_right_answers_replace_the_gold_ones_and_the_test_split_stays(tmp_path):
    """The gold answer of the first question is a part of what the model says; that of the second is not."""
    right, wrong = questions("search", 2)
    [held_out] = questions("test", 1)
    rows = [row(right, "-"), row(wrong, "no such output"), row(held_out, "5")]
    task = MultiDocumentQA(data=file_of(tmp_path / "first.jsonl", rows), mode="oracle")
    prompt = task.prompt(task.examples("search", 1, 0)[0], 0).text
    model, tokenizer = lj.load_model(MODEL, dtype="float32"), lj.load_tokenizer(MODEL)
    [output] = lj.generate(model, tokenizer, [prompt], max_new_tokens=16)
    said = first_line(output)
    rows[0]["answers"] = [said[-4:]]
    data, found = file_of(tmp_path / "data.jsonl", rows), tmp_path / "folder" / "own.jsonl"
    settings = own_answers.Settings(model=MODEL, data=data, limit=2, max_new_tokens=16, output_path=found, dtype="float32")
    own_answers.main(settings)
    assert [json.loads(line) for line in found.read_text(encoding="utf-8").splitlines()] == [
        rows[0] | {"answers": [said]},
        rows[2],
    ]
    searched = MultiDocumentQA(data=found, num_documents=1, distractors="random").examples("search", None, 0)
    assert [example.answers for example in searched] == [(said,)]


def test_without_a_right_answer_nothing_is_written(tmp_path):
    data = file_of(tmp_path / "data.jsonl", [row(questions("search", 1)[0], "no such output")])
    found = tmp_path / "own.jsonl"
    with pytest.raises(UserError, match="none of its 1 answers was right; ask more questions with --limit"):
        own_answers.main(own_answers.Settings(model=MODEL, data=data, limit=1, max_new_tokens=16, output_path=found))
    assert not found.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 0}, "--limit must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens must be at least 1, got 0"),
        ({"output_path": Path(".")}, "--output-path . is a folder; give a file"),
    ],
)
def test_wrong_flags_are_refused_before_the_model_is_loaded(changes, message):
    with pytest.raises(UserError, match=f"^{message}"):
        own_answers.main(own_answers.Settings(**{"data": Path("data.jsonl"), "model": "no such model"} | changes))
