"""Files as editors and shells write them: with a byte-order mark, gzipped, in UTF-16."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lpes_jax.errors import UserError
from lpes_jax.evaluation import json_line
from lpes_jax.factors import LayerFactors
from lpes_jax.search.plain_text import text_windows
from lpes_jax.tasks import make_task
from lpes_jax.tasks.data import json_rows
from lpes_jax.text_files import read_text

BOM = "\ufeff"
PAIRS = [["kléy-1", "välue 1"], ["key-2", "値 2"]]
KV = [{"ordered_kv_records": PAIRS, "key": key, "value": value} for key, value in PAIRS]
DOCUMENT = {"title": "Ünion", "text": "the answer stands in this text", "isgold": True}
MDQA = [{"question": "whérè?", "answers": ["this text"], "ctxs": [DOCUMENT]}]
SCROLLS = [
    {"id": "1", "input": "A dócument. Q?", "output": "an answer"}
    | {"document_start_index": 0, "query_start_index": 12, "truncation_seperator": "..."}
]
L_EVAL = [{"instructions": ["Which óne?"], "outputs": ["B"], "input": "a document", "evaluation": "exam"}]
CSV = "question,A,B,C,D,answer\nWhích?,one,two,three,four,B\n"
ENCODINGS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(path: Path, text: str, encoding: str) -> Path:
    content = text.encode(encoding)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


READERS = {  # what a file holds, and what is read of it
    "kv.jsonl": (lines(KV), lambda path: make_task("kv", data=path, num_pairs=2).examples("all", None, 0)),
    "kv.jsonl.gz": (lines(KV), lambda path: make_task("kv", data=path, num_pairs=2).examples("all", None, 0)),
    "mdqa.jsonl": (lines(MDQA), lambda path: make_task("mdqa", data=path, num_documents=1).examples("all", None, 0)),
    "mdqa.jsonl.gz": (lines(MDQA), lambda path: make_task("mdqa", data=path, num_documents=1).examples("all", None, 0)),
    "qasper.jsonl": (
        lines(SCROLLS),
        lambda path: make_task("zero_scrolls", data=path, subset="qasper").examples("all", None, 0),
    ),
    "quality.jsonl": (lines(L_EVAL), lambda path: make_task("l_eval", data=path, subset="quality").examples("all", None, 0)),
    "x_test.csv": (
        CSV,
        lambda path: make_task("mmlu", data=path.parent.parent, num_shots=0).examples("all", None, 0),
    ),
    "f.json": (
        json.dumps({"format": "lpes-factors/1", "factors": [1.5, 2], "search": {"note": "π"}}, ensure_ascii=False),
        lambda path: (LayerFactors.load(path).factors.tolist(), LayerFactors.load(path).search),
    ),
}


def file_of(folder: Path, name: str) -> Path:
    folder = folder / "test"  # where mmlu looks for it
    folder.mkdir(exist_ok=True)
    return folder / name


@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_changes_nothing(tmp_path, name):
    text, read = READERS[name]
    plain = read(write(file_of(tmp_path, name), text, "utf-8"))
    assert plain == read(write(file_of(tmp_path, name), text, "utf-8-sig")) and plain


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", READERS)
def test_other_encodings_are_called_by_their_names(tmp_path, name, encoding):
    text, read = READERS[name]
    path = write(file_of(tmp_path, name), text, encoding)
    with pytest.raises(UserError, match=f"{encoding[:6].upper()} text; save it as UTF-8") as refusal:
        read(path)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_files_that_were_joined_have_marks_inside(tmp_path):
    rows = [lines([row]) for row in KV]
    (tmp_path / "kv.jsonl").write_bytes(b"".join(row.encode("utf-8-sig") for row in rows))
    task = make_task("kv", data=tmp_path / "kv.jsonl", num_pairs=2)
    assert [example.key for example in task.examples("all", None, 0)] == [key for key, _ in PAIRS]


def test_the_chinese_names_of_subjects(tmp_path):
    for folder, encoding in (("plain", "utf-8"), ("marked", "utf-8-sig")):
        (tmp_path / folder / "val").mkdir(parents=True)
        write(tmp_path / folder / "val" / "law_val.csv", CSV, encoding)
        write(tmp_path / folder / "subject_mapping.json", json.dumps({"law": ["Law", "法律", "STEM"]}), encoding)
        [example] = make_task("ceval", data=tmp_path / folder, num_shots=0).examples("all", None, 0)
        assert example.subject == "法律"
    write(tmp_path / "plain" / "subject_mapping.json", json.dumps({"law": ["Law", "法律", "STEM"]}), "utf-16")
    with pytest.raises(UserError, match="subject_mapping.json"):
        make_task("ceval", data=tmp_path / "plain", num_shots=0).examples("all", None, 0)


def test_plain_text_for_perplexity_and_beside_the_answers(tmp_path, model_folder, tiny_model):
    tokenizer, text = AutoTokenizer.from_pretrained(model_folder), "Ünder the bridge, at dawn. " * 12
    found, kept = [], []
    for name, encoding in (("a.txt", "utf-8"), ("b.txt", "utf-8-sig"), ("c.txt.gz", "utf-8-sig")):
        path = write(tmp_path / name, text, encoding)
        found.append([window.ids for window in make_task("perplexity", data=path, window=32).windows(tokenizer, "all")])
        kept.append(text_windows(path, tiny_model, tokenizer, 0, 32))
    assert found[0] == found[1] == found[2] and found[0][0][0] != tokenizer.encode(BOM)[0]
    assert np.array_equal(kept[0], kept[1]) and np.array_equal(kept[0], kept[2])
    path = write(tmp_path / "d.txt", text, "utf-16")
    for read, flag in (
        (lambda: make_task("perplexity", data=path, window=32).windows(tokenizer, "all"), "--data"),
        (lambda: text_windows(path, tiny_model, tokenizer, 0, 32), "--text"),
    ):
        with pytest.raises(UserError, match=f"{flag} .*d.txt: not readable as UTF-8 text .it is UTF-16 text; save it as UTF-8"):
            read()


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\x00"), max_size=40), st.booleans(), st.booleans()
)
def test_any_text_is_read_as_it_was_written(tmp_path_factory, text, marked, zipped):
    path = tmp_path_factory.getbasetemp() / ("any.txt.gz" if zipped else "any.txt")
    text = text.lstrip(BOM)
    assert read_text(write(path, text, "utf-8-sig" if marked else "utf-8")) == text


@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), st.text(max_size=9), min_size=1), max_size=4), st.booleans(), st.booleans()
)
def test_any_rows_are_read_as_they_were_written(tmp_path_factory, rows, marked, zipped):
    path = tmp_path_factory.getbasetemp() / ("any.jsonl.gz" if zipped else "any.jsonl")
    write(path, "".join(json.dumps(row) + "\n" for row in rows), "utf-8-sig" if marked else "utf-8")
    assert [row for _, row in json_rows(path, (), "a row")] == rows


def test_a_sample_is_one_line_whatever_its_text_holds():
    record = {"output": "a\x0b\x0c\x1c\x1d\x1e\x85b\u2028c\u2029d\r\ne é 日"}
    line = json_line(record)
    assert len(line.splitlines()) == 1 and json.loads(line) == record and "é 日" in line
