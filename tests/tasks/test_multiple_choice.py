"""MMLU and C-Eval: prompts with shots, CSVs of every kind, options, and the shots that are dropped if the window is short."""

import csv
import json

import pytest
from word_tokenizer import num_words, words

from lpes_jax.errors import UserError
from lpes_jax.tasks import make_task
from lpes_jax.tasks.multiple_choice import CsvRow, MultipleChoice, read_csv
from lpes_jax.tasks.prompts import Task, fit, option_prompts

ROWS = [[f'Q {number}, "so"?', "w", "x", "y\nline", "z", "ABCD"[number % 4]] for number in range(7)]


def write_csv(path, rows, header=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(([header] if header else []) + rows)
    return path


@pytest.fixture
def mmlu(tmp_path):
    for subject in ("world_religions", "anatomy"):
        write_csv(tmp_path / "dev" / f"{subject}_dev.csv", ROWS[:2])
        write_csv(tmp_path / "test" / f"{subject}_test.csv", [[f"{subject} {row[0]}", *row[1:]] for row in ROWS[2:]])
    return tmp_path


def test_whole_prompt_byte_for_byte(mmlu):
    task = MultipleChoice("mmlu", mmlu, subjects=("world_religions",), num_shots=2)
    example = task.examples("all", None, 0)[1]
    prompt = task.prompt(example, 0)
    choices = "\nA. w\nB. x\nC. y\nline\nD. z\nAnswer:"
    assert prompt.text == (
        "The following are multiple choice questions (with answers) about  world religions.\n\n"
        f'Q 0, "so"?{choices} A\n\nQ 1, "so"?{choices} B\n\nworld_religions Q 3, "so"?{choices}'
    )
    assert (prompt.gold, prompt.answers, prompt.options) == ("D", (" D",), (" A", " B", " C", " D"))
    assert (task.decided_by, task.metrics, prompt.details) == ("options", ("acc",), {"subject": "world_religions"})
    assert isinstance(task, Task) and task.name == "mmlu"
    assert [task.score(option, prompt)["acc"] for option in prompt.options] == [0, 0, 0, 1]
    assert [(option_prompt.text, option_prompt.answers) for option_prompt in option_prompts([prompt])] == [
        (prompt.text, (option,)) for option in prompt.options
    ]


def test_no_shots_and_all_subjects(mmlu):
    task = make_task("mmlu", data=str(mmlu), num_shots=0)
    examples = task.examples("all", None, 0)
    assert [example.subject for example in examples] == ["anatomy"] * 5 + ["world_religions"] * 5
    assert task.prompt(examples[0], 0).text.startswith(
        "The following are multiple choice questions (with answers) about  anatomy.\n\nanatomy Q 2"
    )
    search, test = ({example.row.question for example in task.examples(split, None, 0)} for split in ("search", "test"))
    assert len(search) + len(test) == 10 and not search & test


def test_shots_are_dropped_from_the_end_until_it_fits(mmlu):
    task = MultipleChoice("mmlu", mmlu, num_shots=2)
    prompt = task.prompt(task.examples("all", 1, 0)[0], 0)
    without = {
        shots: task.prompt(MultipleChoice("mmlu", mmlu, num_shots=shots).examples("all", 1, 0)[0], 0).text for shots in (0, 1)
    }
    for window, expected in (
        (num_words(prompt.text) + 1, prompt.text),
        (num_words(prompt.text), without[1]),
        (num_words(without[1]), without[0]),
    ):
        fitted = fit([prompt], words, window, max_prompt_tokens=task.max_prompt_tokens, new_tokens=task.max_new_tokens)
        assert fitted.prompts[0].text == expected and fitted.num_cut == (expected != prompt.text)
    with pytest.raises(UserError, match="too long"):
        fit([prompt], words, num_words(without[0]), new_tokens=1)


@pytest.mark.parametrize(
    "header, row",
    [
        (None, ["q", "a", "b", "c", "d", "C"]),
        (None, ["0", "q", "a", "b", "c", "d", "C"]),
        (None, ["0", "q", "a", "b", "c", "d", "C", "why"]),
        (["id", "question", "A", "B", "C", "D", "answer", "explanation"], ["0", "q", "a", "b", "c", "d", "C", ""]),
        (["question", "choice0", "choice1", "choice2", "choice3", "answer"], ["q", "a", "b", "c", "d", "2"]),
        (["answer", "D", "C", "B", "A", "question"], [" C ", "d", "c", "b", "a", "q"]),
    ],
)
def test_csvs_of_every_kind(tmp_path, header, row):
    assert read_csv(write_csv(tmp_path / "x.csv", [row], header)) == [CsvRow("q", ("a", "b", "c", "d"), "C")]


def test_ceval(tmp_path):
    header = ["id", "question", "A", "B", "C", "D", "answer"]
    write_csv(tmp_path / "dev" / "law_dev.csv", [["0", "甲？", "一", "二", "三", "四", "B", "因为"]], [*header, "explanation"])
    write_csv(tmp_path / "val" / "law_val.csv", [["0", "乙？", "一", "二", "三", "四", "D"]], header)
    task = make_task("ceval", data=tmp_path, num_shots=1)
    [example] = task.examples("all", None, 0)
    prompt = task.prompt(example, 0)
    assert task.name == "ceval" and prompt.options == ("A", "B", "C", "D") and prompt.gold == "D"
    choices = "\nA. 一\nB. 二\nC. 三\nD. 四\n答案："
    assert prompt.text == f"以下是中国关于law考试的单项选择题，请选出其中的正确答案。\n\n甲？{choices}B\n\n乙？{choices}"
    (tmp_path / "subject_mapping.json").write_text(json.dumps({"law": ["Law", "法学", "Social Science"]}), encoding="utf-8")
    assert "关于法学考试" in task.prompt(task.examples("all", None, 0)[0], 0).text
    (tmp_path / "subject_mapping.json").write_text("[]", encoding="utf-8")
    with pytest.raises(UserError, match="subject_mapping.json is not C-Eval's"):
        task.examples("all", None, 0)


@pytest.mark.parametrize(
    "rows, header, message",
    [
        ([["q", "a", "b", "c"]], None, "x.csv, line 1: 4 columns; a file without a header"),
        ([ROWS[0], ["q", "a", "b"]], None, "x.csv, line 3: 3 columns, but 6 above"),  # the first row takes two
        ([["q", "a", "b", "c", "d", "E"]], None, "x.csv, line 1: the answer 'E' is none of A, B, C, D"),
        ([], ["id", "question", "A", "B", "C", "D"], "line 1: the header lacks answer; C-Eval's test files have none"),
        ([], ["question", "A", "B"], "line 1: the header lacks C, D, answer"),
    ],
)
def test_bad_csvs_are_named(tmp_path, rows, header, message):
    with pytest.raises(UserError, match=message):
        read_csv(write_csv(tmp_path / "x.csv", rows, header))


def test_a_csv_that_is_not_text(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00q")
    with pytest.raises(UserError, match="x.csv: not readable as CSV"):
        read_csv(tmp_path / "x.csv")


def test_settings_that_cannot_be(mmlu, tmp_path):
    for settings, message in (
        ({}, "--data is needed: a folder with dev/ and test/"),
        ({"data": mmlu / "dev"}, "no folder test/ in it; the files are those of hendrycks/test"),
        ({"data": mmlu, "subjects": ("law",)}, "has no law_test.csv; its subjects are: anatomy, world_religions"),
        ({"data": mmlu, "num_shots": -1}, "--num-shots must be at least 0, got -1"),
    ):
        with pytest.raises(UserError, match=message):
            make_task("mmlu", **settings)
    with pytest.raises(UserError, match="--num-shots 5: .*anatomy_dev.csv has 2 rows"):
        MultipleChoice("mmlu", mmlu).examples("all", 1, 0)
    (mmlu / "dev" / "anatomy_dev.csv").unlink()
    with pytest.raises(UserError, match="anatomy_dev.csv is missing"):
        MultipleChoice("mmlu", mmlu, num_shots=1).examples("all", 1, 0)


def test_the_original_files(real):
    path = real("mmlu")
    task = MultipleChoice("mmlu", path)
    examples = task.examples("all", None, 0)
    subjects = [example.subject for example in examples]
    counts = {subject: subjects.count(subject) for subject in subjects}
    assert counts == {"high_school_geography": 198, "marketing": 234, "philosophy": 311, "world_religions": 171}
    for example in examples[::100]:
        rows = {}
        for part in ("dev", "test"):
            with (path / part / f"{example.subject}_{part}.csv").open(encoding="utf-8", newline="") as file:
                rows[part] = [[*row[:5], "ABCD"[int(row[5])]] for row in list(csv.reader(file))[1:]]
        expected = f"The following are multiple choice questions (with answers) about  {example.subject.replace('_', ' ')}.\n\n"
        [asked] = [row for row in rows["test"] if (row[0], tuple(row[1:5])) == (example.row.question, example.row.choices)]
        for row in [*rows["dev"][:5], asked]:
            expected += row[0] + "".join(f"\n{letter}. {choice}" for letter, choice in zip("ABCD", row[1:5], strict=True))
            expected += "\nAnswer:" + (f" {row[5]}\n\n" if row is not asked else "")
        prompt = task.prompt(example, 0)
        assert prompt.text == expected and prompt.gold == asked[5]
