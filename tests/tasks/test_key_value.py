"""Key-value retrieval: the template's bytes, the generator's bytes, files, splits, and every refusal."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpes_jax.errors import UserError
from lpes_jax.tasks.key_value import Example, KeyValue, split_of

THREE = Example(key="k2", value="v2", others=(("k1", "v1"), ("k3", "v3")))
THREE_TEXT = """\
Extract the value corresponding to the specified key in the JSON object below.

JSON data:
{"k1": "v1",
 "k2": "v2",
 "k3": "v3"}

Key: "k2"
Corresponding value:"""


def write_rows(path: Path, rows: list, compress: bool = False) -> Path:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if compress else text.encode())
    return path


def row(gold: str, others: tuple[str, ...] = ("o1", "o2", "o3"), index: int = 1) -> dict:
    records = [[other, f"value of {other}"] for other in others]
    records.insert(index, [gold, f"value of {gold}"])
    return {"ordered_kv_records": records, "key": gold, "value": f"value of {gold}"}


# The prompt


def test_whole_prompt_byte_for_byte():
    prompt = KeyValue(num_pairs=3, answer_opener=None).prompt(THREE, 1)
    assert prompt.text == THREE_TEXT
    assert prompt.answers == (" v2", ' "v2')
    assert (prompt.gold, prompt.position, prompt.slot, prompt.num_items) == ("v2", 50, 1, 3)


def test_the_forced_opener_ends_the_text_and_the_answer_is_the_bare_value():
    prompt = KeyValue(num_pairs=3).prompt(THREE, 1)
    assert prompt.text == THREE_TEXT + ' "'
    assert prompt.answers == ("v2",)
    assert KeyValue(num_pairs=3, answer_opener="").prompt(THREE, 1).answers == (" v2", ' "v2')
    assert KeyValue(num_pairs=3, answer_opener=None, openers=("\n",)).prompt(THREE, 1).answers == ("\nv2",)


def test_one_pair_is_one_line():
    text = KeyValue(num_pairs=1).prompt(Example("k", "v", ()), 0).text
    assert '\n\nJSON data:\n{"k": "v"}\n\nKey: "k"\n' in text


def test_braces_in_the_data_stay():
    text = KeyValue(num_pairs=2).prompt(Example("{key}", "{}", (("{0}", "}{"),)), 1).text
    assert '{"{0}": "}{",\n "{key}": "{}"}\n\nKey: "{key}"\n' in text


def test_the_position_asked_for_is_kept_and_the_id_does_not_depend_on_it():
    task = KeyValue(num_pairs=3)
    first, last = task.prompt(THREE, 0, 20), task.prompt(THREE, 2, 100)
    assert (first.position, first.slot, last.position, last.slot) == (20, 0, 100, 2)
    assert first.example == last.example
    assert first.example != task.prompt(Example("k2", "other", THREE.others), 0).example


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_that_is_not_there(slot):
    with pytest.raises(UserError, match="--slots.*0 to 2"):
        KeyValue(num_pairs=3).prompt(THREE, slot)


@given(st.integers(1, 12), st.data())
@settings(max_examples=40, deadline=None)
def test_gold_is_at_the_slot_and_the_others_keep_their_order(num_pairs, data):
    slot = data.draw(st.integers(0, num_pairs - 1))
    task = KeyValue(num_pairs=num_pairs, key_length=6)
    [example] = task.examples("test", 1, seed=data.draw(st.integers(0, 2**32)))
    text = task.prompt(example, slot).text
    records = list(json.loads(text[text.index("{") : text.index("}") + 1]).items())
    assert records.pop(slot) == (example.key, example.value)
    assert tuple(records) == example.others
    assert len({example.key, *dict(example.others)}) == num_pairs


def test_query_aware_asks_before_the_data_as_well():
    text = KeyValue(num_pairs=3, query_aware=True, answer_opener=None).prompt(THREE, 1).text
    assert text == THREE_TEXT.replace("\n\nJSON data:", '\n\nKey: "k2"\n\nJSON data:')


def test_score_is_the_substring_rule():
    task = KeyValue(num_pairs=3)
    prompt = task.prompt(THREE, 1)
    assert [task.score(output, prompt) for output in ("\nit is V2.", "v 2", "")] == [
        {"substring": right} for right in (1, 0, 0)
    ]


# The generator


def test_generated_bytes_are_the_same_everywhere():
    assert KeyValue(num_pairs=3).examples("test", 1, seed=0) == [
        Example(
            key="845151a7-aebb-4079-aa56-538216ec05b2",
            value="529657dc-fd8d-4fc3-aea0-36ba75d1a9f3",
            others=(
                ("a5889488-c9f4-4fb8-b4ec-e61fc8ff3232", "ac724621-6fbb-4d91-84d7-ae757fbaadc6"),
                ("fd63d729-1d8f-4271-b5d3-b4ace77d7fdc", "712f826c-19a9-434c-ba16-2f665fbbaa28"),
            ),
        )
    ]
    assert KeyValue(num_pairs=2, key_length=4).examples("search", 2, seed=7) == [
        Example(key="ed56", value="d0ad", others=(("c7ae", "159a"),)),
        Example(key="c891", value="cd0e", others=(("a3a6", "0e1e"),)),
    ]


def test_more_examples_or_pairs_leave_the_first_as_they_were():
    few, many = KeyValue(num_pairs=5).examples("search", 3, seed=1), KeyValue(num_pairs=9).examples("search", 6, seed=1)
    assert [(e.key, e.value, e.others) for e in few] == [(e.key, e.value, e.others[:4]) for e in many[:3]]
    assert len({example.id for example in many}) == 6
    assert KeyValue(num_pairs=5).examples("search", 3, seed=2) != few


@given(st.integers(0, 10), st.integers(0, 10))
@settings(max_examples=20, deadline=None)
def test_search_and_test_never_share_a_gold_key_even_where_keys_are_scarce(search_seed, test_seed):
    task = KeyValue(num_pairs=3, key_length=1)  # 16 keys there are
    search = {example.key for example in task.examples("search", 30, search_seed)}
    test = {example.key for example in task.examples("test", 30, test_seed)}
    assert search and test and not search & test


def test_as_many_pairs_as_there_are_keys():
    [example] = KeyValue(num_pairs=16, key_length=1).examples("all", 1, seed=0)
    assert {example.key, *dict(example.others)} == set("0123456789abcdef")


def test_two_in_five_keys_are_search_keys():
    share = sum(split_of(str(number)) == "search" for number in range(5000)) / 5000
    assert 0.38 < share < 0.42


def test_several_queries_ask_for_the_nearest_keys_of_pairs_that_stay():
    task = KeyValue(num_pairs=20, queries_per_haystack=4)
    examples = task.examples("search", 10, seed=3)
    assert examples == task.examples("search", 12, seed=3)[:10]
    haystacks = [examples[start].pairs for start in (0, 4, 8)]
    assert [example.pairs for example in examples] == [haystacks[number // 4] for number in range(10)]
    assert len({example.id for example in examples}) == 10 and len(set(haystacks)) == 3
    prompts = [task.prompt(example, slot, 7) for slot in (0, 10, 19) for example in examples[:4]]
    assert [prompt.slot for prompt in prompts] == [0, 1, 2, 3, 10, 9, 11, 8, 19, 18, 17, 16]
    shared = prompts[0].text.partition("Key: ")[0]
    for prompt in prompts:
        key, value = haystacks[0][prompt.slot]
        assert prompt.text == f'{shared}Key: "{key}"\nCorresponding value: "' and prompt.answers == (value,)
        assert (prompt.gold, prompt.position) == (value, 7)
    keys = {
        split: {key for example in task.examples(split, 10, seed=3) for key, _ in example.pairs} for split in ("search", "test")
    }
    assert all({split_of(key) for key in found} == {split} for split, found in keys.items())


# Files


@pytest.mark.parametrize("compress", [False, True])
def test_rows_are_split_by_key_in_the_files_order(tmp_path, compress):
    golds = [f"gold {number}" for number in range(30)]
    path = write_rows(tmp_path / ("kv.jsonl.gz" if compress else "kv.jsonl"), [row(gold) for gold in golds], compress)
    task = KeyValue(num_pairs=4, data=path)
    keys = {split: [gold for gold in golds if split_of(gold) == split] for split in ("search", "test")}
    for split, expected in keys.items():
        assert [example.key for example in task.examples(split, len(expected), seed=0)] == expected
        assert task.examples(split, len(expected), seed=0) == task.examples(split, len(expected), seed=5)
        with pytest.raises(UserError, match=f"{len(expected) + 1} examples.*has {len(expected)}"):
            task.examples(split, len(expected) + 1, seed=0)
    assert min(map(len, keys.values())) > 0
    assert [example.key for example in task.examples("all", 30, seed=0)] == golds


def test_fewer_pairs_than_the_file_has_are_gold_and_the_first_others(tmp_path):
    path = write_rows(tmp_path / "kv.jsonl", [row("gold", index=3)])
    [example] = KeyValue(num_pairs=3, data=path).examples("all", 1, seed=0)
    assert example == Example("gold", "value of gold", (("o1", "value of o1"), ("o2", "value of o2")))


def test_several_queries_of_a_row_are_of_its_split(tmp_path):
    golds = [f"gold {number}" for number in range(8)]
    rows = [row(gold, tuple(f"{gold} other {number}" for number in range(12))) for gold in golds]
    path = write_rows(tmp_path / "kv.jsonl", rows)
    task = KeyValue(num_pairs=10, data=path, queries_per_haystack=2)
    for split in ("search", "test"):
        examples = task.examples(split, None, seed=0)
        assert len(examples) == 2 * sum(split_of(gold) == split for gold in golds)
        for example in examples:
            keys = [key for key, _ in example.pairs]
            prompt = task.prompt(example, 1)  # where the row's own gold pair stands
            assert keys[1] in golds and split_of(keys[prompt.slot]) == split
            assert (prompt.slot == 1) == (example.number == 0)
    with pytest.raises(UserError, match=r"line 1: only \d of its keys have a value and belong to the split"):
        KeyValue(num_pairs=10, data=path, queries_per_haystack=9).examples("all", None, seed=0)


@pytest.mark.parametrize(
    "bad, message",
    [
        ("{not json", "line 2: not a lost-in-the-middle row"),
        ("[" * 100_000, "line 2: not a lost-in-the-middle row"),
        ([1, 2], "line 2: not a lost-in-the-middle row"),
        ({"key": "a", "value": "b"}, "line 2: not a lost-in-the-middle row"),
        ({"ordered_kv_records": [["a", 1]], "key": "a", "value": 1}, "line 2: not a lost-in-the-middle row"),
        (row("x", others=("o1", "o2", "o1")), "line 2: the key 'o1' is repeated"),
        ({**row("x"), "value": "another"}, "line 2: the pair asked for .'x'. is not among"),
        (row("x", others=("o1",)), "line 2: 2 pairs, but --num-pairs is 4; use at most 2"),
        (row("gold"), "line 2: the same example as line 1"),
    ],
)
def test_bad_lines_are_named(tmp_path, bad, message):
    path = write_rows(tmp_path / "kv.jsonl", [row("gold"), bad])
    with pytest.raises(UserError, match=message) as raised:
        KeyValue(num_pairs=4, data=path).examples("all", 1, seed=0)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"not gzip", gzip.compress(json.dumps(row("gold")).encode() * 50)[:-20]])
def test_a_broken_gzip_file(tmp_path, content):
    path = tmp_path / "kv.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match="--data .*not readable"):
        KeyValue(num_pairs=4, data=path).examples("all", 1, seed=0)


def test_a_file_that_is_not_utf8(tmp_path):
    path = tmp_path / "kv.jsonl"
    path.write_bytes(b'{"key": "\xff"}\n')
    with pytest.raises(UserError, match="--data .*not readable"):
        KeyValue(num_pairs=1, data=path).examples("all", 1, seed=0)


@pytest.mark.parametrize("name, pairs, rows", [("kv50.jsonl", 50, 200), ("kv-retrieval-75_keys.jsonl.gz", 75, 500)])
def test_the_original_files(real, name, pairs, rows):
    path = real(f"kv/{name}")
    task = KeyValue(num_pairs=pairs, data=path)
    examples = task.examples("all", rows, seed=0)
    assert len({example.id for example in examples}) == rows
    with pytest.raises(UserError, match=f"has {rows}"):
        task.examples("all", rows + 1, seed=0)
    search = sum(split_of(example.key) == "search" for example in examples)
    first = task.examples("search", search, seed=0) + task.examples("test", rows - search, seed=0)
    assert {example.id for example in first} == {example.id for example in examples}
    assert 0.3 < search / rows < 0.5
    # Gold back at its own slot gives the file's own order.
    opener = gzip.open if name.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as lines:
        original = json.loads(next(iter(lines)))
    slot = original["ordered_kv_records"].index([original["key"], original["value"]])
    text = task.prompt(examples[0], slot).text
    assert list(json.loads(text[text.index("{") : text.index("}") + 1]).items()) == [
        tuple(record) for record in original["ordered_kv_records"]
    ]


# Settings


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"num_pairs": 0}, "--num-pairs must be at least 1, got 0"),
        ({"num_pairs": 2, "key_length": 0}, "--key-length must be at least 1, got 0"),
        ({"num_pairs": 17, "key_length": 1}, "--key-length 1 gives only 16 distinct keys for --num-pairs 17"),
        ({"num_pairs": 2, "data": Path("nowhere.jsonl")}, "--data nowhere.jsonl: no such file"),
        ({"num_pairs": 2, "data": Path(__file__), "key_length": 4}, "--key-length is for generated pairs"),
        ({"num_pairs": 2, "answer_opener": None, "openers": ()}, "--openers"),
        ({"num_pairs": 5, "key_length": 1, "queries_per_haystack": 4}, "a split has too few of the 16 keys for 5 pairs"),
        ({"num_pairs": 2, "queries_per_haystack": 3}, "--queries-per-haystack 3: .* from 1 to one below --num-pairs .2."),
        ({"num_pairs": 5, "queries_per_haystack": 5}, "otherwise every position would ask about all pairs"),
    ],
)
def test_settings_that_cannot_be(wrong, message):
    with pytest.raises(UserError, match=message):
        KeyValue(**wrong)


def test_a_negative_count():
    with pytest.raises(UserError, match="--limit"):
        KeyValue(num_pairs=2).examples("test", -1, seed=0)
    with pytest.raises(UserError, match="need a --limit"):
        KeyValue(num_pairs=2).examples("test", None, seed=0)
