"""Several tasks for one search: `--mixture FILE`, or several names in `--task`.

    [[task]]                            # a block for each task
    task = "kv"
    num_pairs = [5, 10, 20]             # one task for each length, each with the block's limit and weight
    key_length = 8
    limit = 100                         # search examples; default: --limit
    test_limit = 150                    # held-out questions; default: --test-limit
    weight = 2.0                        # of its loss, or of its fitness, beside the others' (default 1)

    [[task]]
    task = "mdqa"
    data = "nq-open-oracle.jsonl.gz"    # paths start from this file's folder, or from --data-folder
    num_documents = "5:20"              # a length of its own for each example, drawn log-uniformly

A block has the flags of its task by their names, with underscores or hyphens. The same task may come several times, with other
data or in other forms. What is wrong is said in one line with the file, the block and the key.
"""

import re
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lpes_jax.errors import UserError
from lpes_jax.limits import BOUNDS, Bound, check_number, check_path
from lpes_jax.settings.groups import TaskSettings
from lpes_jax.store.content import content_sha256
from lpes_jax.tasks import TASKS, settings_of
from lpes_jax.tasks.flags import LENGTHS, SETTINGS, given, make_tasks
from lpes_jax.tasks.prompts import Task
from lpes_jax.tasks.ranged import Ranged
from lpes_jax.text_files import read_text

GENERATED = ("kv", "needle")  # tasks that need no file
_OWN = {"limit": int, "test_limit": int, "weight": int | float}
_WEIGHT = Bound(0, 1e9, "beside the other tasks' weights", above=True)
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path as text"}


@dataclass(frozen=True)
class Part:
    """One task of a mixture, of one length.

    title: what tables, pictures and records call it; no other part has the same. limit, test_limit: search examples and
    held-out questions. weight: of its loss or fitness, beside the others'. where: how a complaint about it begins. settings: of
    the task, as they were given.
    """

    title: str
    task: Task[Any]
    limit: int
    test_limit: int
    weight: float
    where: str
    settings: Mapping[str, Any]

    @contextmanager
    def told(self) -> Iterator[None]:
        """A UserError in here says which part it is about."""
        try:
            yield
        except UserError as error:
            raise UserError(f"{self.where}: {error}") from error

    def record(self) -> dict[str, Any]:
        """What decides its questions and its part of the result, a file by its name and content."""
        values = {name: value for name, value in self.settings.items() if name != "data"}
        values |= {"task": self.task.name, "limit": self.limit, "test_limit": self.test_limit, "weight": self.weight}
        if isinstance(data := self.settings.get("data"), Path):
            with self.told():
                values |= {"data": data.name, "data_sha256": content_sha256(data, "data ")}
        return values


@dataclass(frozen=True)
class Mixture:
    """Tasks that are searched on together."""

    parts: tuple[Part, ...]

    @property
    def tasks(self) -> list[Task[Any]]:
        return [part.task for part in self.parts]

    @property
    def titles(self) -> list[str]:
        return [part.title for part in self.parts]

    @property
    def weights(self) -> list[float]:
        """Of the parts; they sum to 1."""
        total = sum(part.weight for part in self.parts)
        return [part.weight / total for part in self.parts]

    def record(self) -> dict[str, Any]:
        """Each part's record by its title."""
        return {part.title: part.record() for part in self.parts}

    def with_tasks(self, change: Callable[[Task[Any]], Task[Any]]) -> "Mixture":
        """The same with every task changed, say asked in a chat."""
        return Mixture(tuple(replace(part, task=change(part.task)) for part in self.parts))


def mixture_of(flags: TaskSettings, limit: int, test_limit: int, **more: Any) -> Mixture | None:
    """The mixture that the flags ask for; None for one task. `more`: settings that those tasks get that have them.

    Raises UserError for a file that is no mixture, and for tasks that cannot be.
    """
    if flags.data_folder is not None and flags.mixture is None:
        raise UserError("--data-folder is where the paths of --mixture start from; give --data with one task")
    if not flags.is_mixture:
        return None
    if flags.mixture is not None:
        return _from_file(flags, flags.mixture, limit, test_limit, more)
    return _from_names(flags, limit, test_limit, more)


def _from_names(flags: TaskSettings, limit: int, test_limit: int, more: Mapping[str, Any]) -> Mixture:
    names: Sequence[Any] = (flags.task,) if isinstance(flags.task, str) else flags.task
    flag = f"--task {' '.join(names)}"
    if len(set(names)) < len(names):
        raise UserError(f"{flag}: a task stands there twice; give the forms of one task in a --mixture")
    settings = given(flags)
    if unknown := next((name for name in settings if not any(name in settings_of(task) for task in names)), None):
        raise UserError(f"{flag}: none of these tasks has --{_hyphens(unknown)}; leave it out")
    of_file = [name for name in names if name not in GENERATED]
    if len(of_file) > 1 and "data" in settings:
        raise UserError(f"{flag}: one --data cannot be that of {' and '.join(of_file)}; give each its own in a --mixture")
    parts: list[Part] = []
    for name in names:
        own = {key: value for key, value in settings.items() if key in settings_of(name)}
        if of_file and name in GENERATED:
            own.pop("data", None)
        _add(parts, name, own, limit, test_limit, 1.0, f"--task {name}", more)
    return Mixture(tuple(parts))


def _from_file(flags: TaskSettings, path: Path, limit: int, test_limit: int, more: Mapping[str, Any]) -> Mixture:
    named = ["task"] if flags.task != TaskSettings.task else []
    named += [name for name in SETTINGS if getattr(flags, name) != getattr(TaskSettings, name)]
    if named:
        raise UserError(
            f"--mixture {path} says what the tasks are: --{_hyphens(named[0])} would be of none of them, or of all; "
            "write it into the file's blocks"
        )
    folder = flags.data_folder or path.parent
    if not folder.is_dir():
        raise UserError(f"--data-folder {folder}: no such folder; paths in --mixture start from there")
    parts: list[Part] = []
    for number, block in enumerate(_blocks(path), 1):
        where = f"--mixture {path}, block {number}"
        name, own, settings = _read(block, where, folder)
        where = f"{where} ({name})"
        for key, value in own.items():
            check_number(
                f"{where}: {key}", value, _WEIGHT if key == "weight" else BOUNDS[key], float if key == "weight" else int
            )
        sizes = own.get("limit", limit), own.get("test_limit", test_limit)
        _add(parts, name, settings, *sizes, float(own.get("weight", 1.0)), where, more)
    return Mixture(tuple(parts))


def _add(
    parts: list[Part],
    name: Any,
    settings: dict[str, Any],
    limit: int,
    test_limit: int,
    weight: float,
    where: str,
    more: Mapping[str, Any],
) -> None:
    """The tasks of one block, behind those that are there."""
    if name == "perplexity":
        raise UserError(f"{where}: perplexity has no questions to search on; give its text as --text")
    try:
        tasks = make_tasks(name, settings, **more)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    for task in tasks:
        if same := next((part for part in parts if part.task == task), None):
            raise UserError(f"{where}: the task {same.title!r} stands there twice; give it once, with a higher weight")
        lengths = {key: _length_of(task, key) for key in LENGTHS if key in settings}
        title = _title(name, task, settings)
        others = sum(part.title.split(" #")[0] == title for part in parts)
        title += f" #{others + 1}" if others else ""
        parts.append(Part(title, task, limit, test_limit, weight, where, settings | lengths))


def _length_of(task: Any, setting: str) -> int | str:
    return f"{task.low}:{task.high}" if isinstance(task, Ranged) else getattr(task, setting)


def _title(name: str, task: Any, settings: Mapping[str, Any]) -> str:
    """`5 key-value pairs, key length 8`; `10 documents of nq-open-oracle, distractors random`."""
    heads = {"kv": ("num_pairs", "{} key-value pairs"), "needle": ("num_sentences", "needle in {} sentences")}
    heads["mdqa"] = ("num_documents", "{} documents")
    setting, head = heads.get(name, ("", f"{name} {settings.get('subset', '')}".strip()))
    moved = name != "mdqa" or settings.get("mode", "documents") == "documents"
    length = str(_length_of(task, setting)).replace(":", " to ") if setting else ""
    head = head.format(length) if moved else name
    data = settings.get("data")
    head += f" of {data.name.split('.')[0]}" if isinstance(data, Path) else ""
    shown = []
    for key, value in settings.items():
        if key in ("data", "subset", setting):
            continue
        words = " ".join(map(str, value)) if isinstance(value, tuple) else repr(value) if value == "" else str(value)
        shown.append(key.replace("_", " ") + ("" if value is True else f" {words.strip() or repr(value)}"))
    return ", ".join([head, *shown])


def _blocks(path: Path) -> list[dict[str, Any]]:
    try:
        content = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--mixture {path}: not TOML ({error})") from error
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"--mixture {path}: cannot be read ({reason}); give a TOML file with a block [[task]] a task"
        ) from error
    if others := [key for key in content if key != "task"]:
        raise UserError(f"--mixture {path}: {others[0]} is no part of it; it has blocks [[task]] alone")
    blocks = content.get("task", [])
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, dict) for block in blocks):
        raise UserError(f"--mixture {path}: it has no block [[task]] with task = its name; give one for each task")
    return blocks


def _read(block: dict[str, Any], where: str, folder: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A block's task, what it says of it besides, and the task's settings."""
    name = block.get("task")
    if name not in TASKS:
        what = "has no key task" if name is None else f"task = {name!r} is not known"
        raise UserError(f"{where}: {what}; the tasks are: {', '.join(TASKS)}")
    hints = get_type_hints(TaskSettings)
    known = {key: hints[key] for key in SETTINGS if key in settings_of(name)}
    values: dict[str, Any] = {}
    for key, value in block.items():
        setting = key.replace("-", "_")
        if setting == "task":
            continue
        if setting in values:
            raise UserError(f"{where} ({name}): {key} stands there twice, with a hyphen and with an underscore; give it once")
        hint = (_OWN | known).get(setting)
        if hint is None:
            raise UserError(f"{where} ({name}): {key} is no key of it; it has: task, {', '.join([*_OWN, *known])}")
        try:
            values[setting] = _typed(value, hint, folder)
            if isinstance(values[setting], Path):
                check_path(f"{where} ({name}): {key} = ", values[setting])
        except TypeError:
            raise UserError(f"{where} ({name}): {key} = {value!r} must be {_words(hint)}") from None
    settings = {key: value for key, value in values.items() if key not in _OWN and value is not False}
    return name, {key: value for key, value in values.items() if key in _OWN}, settings


def _typed(value: Any, hint: Any, folder: Path) -> Any:
    """A value of TOML as the flag of this type has it. Raises TypeError for one of another type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for option in inner:
            try:
                return _typed(value, option, folder)
            except TypeError:
                continue
    elif origin is Literal:
        if isinstance(value, str) and value in inner:
            return value
    elif origin is tuple:
        if isinstance(value, list) and value:
            return tuple(_typed(it, inner[0], folder) for it in value)
    elif hint is Path:
        if isinstance(value, str) and value:
            return folder / value
    elif type(value) is hint:
        return value
    raise TypeError(f"{value!r} is no {hint}")


def _words(hint: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_words(option) for option in inner if option is not NoneType))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, inner))
    if origin is tuple:
        return f"a list of {_words(inner[0])}"
    return _WORDS[hint]


def file_stem(title: str) -> str:
    """A title as a part of a file's name."""
    return re.sub(r"\W+", "_", title).strip("_")


def _hyphens(name: str) -> str:
    return name.replace("_", "-")
