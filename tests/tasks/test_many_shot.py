"""Many-shot classification: the template, the one shot with the label, splits, files that cannot be."""

import csv
from pathlib import Path

import pytest

from lpes_jax.errors import UserError
from lpes_jax.tasks import make_task
from lpes_jax.tasks.data import split_of
from lpes_jax.tasks.many_shot import Example, ManyShot
from lpes_jax.tasks.prompts import Task


@pytest.fixture
def intents(tmp_path: Path) -> Path:
    """Twelve labels with eight texts each."""
    path = tmp_path / "intents.csv"
    with path.open("w", newline="") as file:
        rows = [(f"please, do thing {label} the {way}. way", f"thing_{label}") for way in range(8) for label in range(12)]
        csv.writer(file).writerows([("text", "category"), *rows])
    return path


def test_whole_prompt_byte_for_byte(intents):
    task = ManyShot(intents, num_shots=3)
    example = Example("Where is it?", "412", "It is not here.", (("Which ones?", "705"), ("How much?", "333")))
    prompt = task.prompt(example, 1)
    assert prompt.text == (
        "Label each text. Texts that mean the same have the same label.\n\ntext: Which ones?\nlabel: 705\n\n"
        "text: It is not here.\nlabel: 412\n\ntext: How much?\nlabel: 333\n\ntext: Where is it?\nlabel:"
    )
    assert (prompt.answers, prompt.gold, prompt.position, prompt.num_items) == ((" 412\n",), "412", 50, 3)
    assert isinstance(task, Task) and prompt.faults == ()
    for output, exact in ((" 412\n\ntext:", 1), ("412", 1), (" 4123", 0), (" 705\n412", 0), ("", 0)):
        assert task.score(output, prompt) == {"exact": exact}


def test_the_label_asked_for_is_only_in_the_fact(intents):
    task = make_task("many_shot", data=str(intents), num_shots=20)
    for split in ("search", "test"):
        examples = task.examples(split, 8, seed=0)
        assert {
            split_of(text)
            for example in examples
            for text in (example.text, example.fact, *(shown for shown, _ in example.others))
        } == {split}
        for example in examples:
            assert example.text != example.fact and example.label not in [label for _, label in example.others]
            assert len(example.others) == 19 and example.text.split(".")[0][:18] == example.fact.split(".")[0][:18]
            counts = [[label for _, label in example.others].count(label) for _, label in example.others]
            assert max(counts) - min(counts) <= 1 and all(100 <= int(label) < 1000 for _, label in example.others)
    assert task.examples("test", 4, seed=0) == task.examples("test", 9, seed=0)[:4] != task.examples("test", 4, seed=1)
    named = make_task("many_shot", data=intents, num_shots=20, labels="names").examples("test", 1, seed=0)[0]
    assert named.label == "thing_" + named.text.split()[3]


def test_files_that_cannot_be(tmp_path, intents):
    bad = tmp_path / "bad.csv"
    for text, message in (
        ("a,b\nc,d,e\n", r"bad.csv, line 2: 3 columns, not a CSV of text and label"),
        ("a,b\n,c\n", "bad.csv, line 2: an empty text or label"),
        ("a,b\nc,d\n", r"--num-shots 4: .*bad.csv has too few texts of other labels"),
    ):
        bad.write_text(text)
        with pytest.raises(UserError, match=message):
            ManyShot(bad, num_shots=4).examples("all", 1, 0)
    with pytest.raises(UserError, match="--data is needed: a CSV of text and label"):
        make_task("many_shot")
    with pytest.raises(UserError, match="--num-shots 0: the fact of --task many_shot is a solved example"):
        ManyShot(intents, num_shots=0)
    with pytest.raises(UserError, match="--num-shots 90: .* has too few texts of other labels"):
        ManyShot(intents, num_shots=90).examples("all", 1, 0)
