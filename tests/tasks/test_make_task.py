"""Tasks by their names: settings, and errors in one line."""

import pytest

from lpes_jax.errors import UserError
from lpes_jax.tasks import TASKS, make_task, settings_of
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.needle import Needle
from lpes_jax.tasks.perplexity import Perplexity
from lpes_jax.tasks.prompts import Task


def test_tasks_by_name(tmp_path):
    task = make_task("kv", num_pairs=7, key_length=8)
    assert task == KeyValue(num_pairs=7, key_length=8)
    assert isinstance(task, Task) and task.name in TASKS and task.num_items == 7
    assert make_task("needle", num_keys=3) == Needle(num_keys=3)
    path = tmp_path / "text.txt"
    path.write_text("text", encoding="utf-8")
    assert make_task("perplexity", data=str(path)) == Perplexity(path)
    assert settings_of("ceval") == settings_of("mmlu") == ("data", "subjects", "num_shots")


@pytest.mark.parametrize(
    "name, settings, message",
    [
        (
            "kvv",
            {},
            "--task 'kvv' is not known; the tasks are: kv, mdqa, needle, niah, vt, cwe, fwe, many_shot, zero_scrolls, l_eval, ",
        ),
        ("kv", {}, "--task kv needs --num-pairs"),
        ("needle", {"num_pairs": 3}, "--num-pairs is not a setting of --task needle, which has: --num-sentences, --num-keys"),
        ("mmlu", {"benchmark": "ceval"}, "--benchmark is not a setting of --task mmlu"),
        ("l_eval", {}, "--data is needed: the files are in OpenLMLab/LEval"),
        ("zero_scrolls", {"data": "no.jsonl"}, "--data no.jsonl: no such file; the validation files are in tau/zero_scrolls"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(name, settings, message):
    with pytest.raises(UserError, match=message) as raised:
        make_task(name, **settings)
    assert "\n" not in str(raised.value)
