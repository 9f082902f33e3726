"""The run store: files whole or not at all, the finished parts of a run, and that nothing else in the library writes so."""

import ast
import json
import os
from pathlib import Path

import pytest

from lpes_jax.errors import UserError
from lpes_jax.store.files import replacing, unwritable, write_json, write_text, writing
from lpes_jax.store.parts import Parts

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {"model": {"name": "a"}, "settings": {"limit": 3}, "environment": {"git_commit": "0"}}


def needs_setting(record: dict) -> str:
    """What checks a record here."""
    return record["setting"].strip()


def parts(folder: Path, **changes) -> Parts:
    return Parts(folder, CONFIG | changes.pop("config", {}), {"tuned": needs_setting}, **{"resume": False} | changes)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.bin"
    with replacing(path) as part:
        part.write_bytes(b"first")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), replacing(path) as part:
        part.write_bytes(b"half of the sec")
        raise ZeroDivisionError
    assert path.read_bytes() == b"first" and os.listdir(tmp_path) == ["a.bin"]
    with replacing(path, previous=tmp_path / "before.bin") as part:
        part.write_bytes(b"second")
    assert path.read_bytes() == b"second" and (tmp_path / "before.bin").read_bytes() == b"first"
    (tmp_path / "downloads").mkdir()
    with replacing(path, part=tmp_path / "downloads" / "b.bin") as part:
        part.write_bytes(b"third")
    assert path.read_bytes() == b"third" and not os.listdir(tmp_path / "downloads")


def test_a_writer_that_makes_no_file_leaves_the_old_one(tmp_path):
    write_text(tmp_path / "a.md", "old")
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "a.md"):
        pass
    assert (tmp_path / "a.md").read_text() == "old"


def test_json_that_is_none_changes_nothing(tmp_path):
    write_json(tmp_path / "a.json", {"ß": 1})
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"ß": float("nan")})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n "ß": 1\n}\n' and len(os.listdir(tmp_path)) == 1


def test_what_cannot_be_written_is_one_line_with_a_way_out(tmp_path):
    with pytest.raises(UserError, match=r"^--output-path x: cannot be written \(File name too long\); give another folder$"):
        with writing("--output-path x"):
            write_text(tmp_path / ("n" * 300), "")
    assert str(unwritable(OSError("two\nlines"), "x")) == "x: cannot be written (two lines)"


def test_finished_parts_are_there_again(tmp_path):
    with parts(tmp_path) as kept:
        assert kept.records == {"tuned": {}} and not os.listdir(tmp_path)  # nothing before the first record
        kept.keep("tuned", "yarn", {"setting": "factor 2"})
        kept.keep("tuned", "pi", {"setting": "1"})
        kept.forget("tuned", "pi")
        kept.forget("tuned", "never kept")
    with pytest.raises(UserError, match="pass --resume to continue"):
        parts(tmp_path)
    with pytest.raises(UserError, match=r"was run with --limit 3 \(now 4\)"):
        parts(tmp_path, resume=True, config={"settings": {"limit": 4}})
    with parts(tmp_path, resume=True) as kept:
        assert kept.records == {"tuned": {"yarn": {"setting": "factor 2"}}}
        kept.drop()
    assert not os.listdir(tmp_path)
    with pytest.raises(UserError, match="--resume: .* contains no interrupted comparison"):
        parts(tmp_path, resume=True)


def test_damaged_parts_are_named_and_those_without_a_begin_are_not_taken(tmp_path):
    with parts(tmp_path) as kept:
        kept.keep("tuned", "yarn", {"setting": "factor 2"})
    record = tmp_path / "unfinished" / "yarn.tuned.json"
    record.write_text(json.dumps({"setting": 3}))
    with pytest.raises(UserError, match="yarn.tuned.json: not a record of a comparison .*; delete it"):
        parts(tmp_path, resume=True)
    (tmp_path / "unfinished" / "begun.json").unlink()
    with parts(tmp_path, resume=True) as kept:
        assert kept.records == {"tuned": {}}
    assert not os.listdir(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="there are no such locks")
def test_two_runs_do_not_keep_parts_in_one_folder(tmp_path):
    with parts(tmp_path) as first, parts(tmp_path) as second:
        first.keep("tuned", "yarn", {"setting": "factor 2"})
        with pytest.raises(UserError, match="another process is working in this folder"):
            second.keep("tuned", "yarn", {"setting": "factor 3"})
        for way in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(UserError, match="another process is working in this folder"):
                parts(tmp_path, **way)
    with parts(tmp_path, resume=True) as kept:
        assert kept.records["tuned"] == {"yarn": {"setting": "factor 2"}}


def test_a_part_that_cannot_be_written_says_how_to_go_on(tmp_path):
    with parts(tmp_path) as kept:
        kept.keep("tuned", "yarn", {"setting": "factor 2"})
        with pytest.raises(UserError, match="cannot be written .*; make room, then continue with --resume"):
            kept.keep("tuned", "n" * 300, {"setting": "factor 2"})
    with parts(tmp_path, resume=True) as kept:
        assert list(kept.records["tuned"]) == ["yarn"]


def test_the_store_alone_replaces_files_and_says_what_cannot_be_written():
    renames, sentences = set(), set()
    for folder in ("lpes_jax", "models", "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            if folder == "lpes_jax" and "models" in path.relative_to(ROOT).parts:
                continue  # the link
            name = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                    renames |= {name} if node.attr == "replace" else set()
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and ": cannot be written (" in node.value:
                    sentences.add(name)
    assert renames == {f"lpes_jax/store/{name}.py" for name in ("files", "output")}
    assert sentences == {"lpes_jax/store/files.py"}
