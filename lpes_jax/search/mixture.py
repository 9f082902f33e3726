"""Several tasks for one search: `--mixture FILE`, or several names in `--task`.

    [[task]]                            # a block for each task
    task = "kv"
    num_pairs = [5, 10, 20]             # one task for each length, each with the block's limit and weight
    key_length = 8
    limit = 100                         # search examples; default: --limit
    test_limit = 150                    # held-out questions; default: --test-limit
    weight = 2.0                        # of its loss or fitness, relative to the other tasks (default 1)

    [[task]]
    task = "mdqa"
    data = "nq-open-oracle.jsonl.gz"    # paths start from this file's folder, or from --data-folder
    num_documents = "5:20"              # a length of its own for each example, drawn log-uniformly

A block has the flags of its task, with underscores or hyphens. A task may have several blocks, with other data or settings.
Errors are one line and name the file, the block and the key.

The verb compare reads `--other-tasks FILE` in the same form (`other_parts`). Nothing is tuned on these tasks, so their blocks
have no limit and no weight.
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
_ONLY_SEARCHED = ("limit", "weight")
_WEIGHT = Bound(0, 1e9, "beside the other tasks' weights", above=True)
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path as text"}


@dataclass(frozen=True)
class _Use:
    """What the tasks of a file are used for. The texts end error messages, after the name of the task."""

    flag: str
    keys: Mapping[str, Any]  # of a block itself, with their types
    perplexity: str
    repeated: str


_SEARCHED = _Use(
    "--mixture", _OWN, "has no questions to search on; use --text for its text", "give it once, with a higher weight"
)
_MEASURED = _Use(
    "--other-tasks",
    {key: hint for key, hint in _OWN.items() if key not in _ONLY_SEARCHED},
    "has no positions to compare; use evaluate",
    "the tuned task and the other tasks must differ",
)


@dataclass(frozen=True)
class Part:
    """One task of a mixture, of one length.

    title: its unique name in tables, plots and records. limit, test_limit: numbers of search examples and held-out questions.
    weight: of its loss or fitness, relative to the other parts. where: the beginning of its error messages. settings: of
    the task, as given.
    """

    title: str
    task: Task[Any]
    limit: int
    test_limit: int
    weight: float
    where: str
    settings: Mapping[str, Any]

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Put `where` before the message of a UserError."""
        try:
            yield
        except UserError as error:
            raise UserError(f"{self.where}: {error}") from error

    def record(self) -> dict[str, Any]:
        """Everything that determines its questions and its share of the result; a file by its name and hash."""
        values = {name: value for name, value in self.settings.items() if name != "data"}
        values |= {"task": self.task.name, "limit": self.limit, "test_limit": self.test_limit, "weight": self.weight}
        if isinstance(data := self.settings.get("data"), Path):
            with self.naming_errors():
                values |= {"data": data.name, "data_sha256": content_sha256(data, "data ")}
        return values


@dataclass(frozen=True)
class Mixture:
    """The tasks of one search."""

    parts: tuple[Part, ...]

    @property
    def tasks(self) -> list[Task[Any]]:
        return [part.task for part in self.parts]

    @property
    def titles(self) -> list[str]:
        return [part.title for part in self.parts]

    @property
    def weights(self) -> list[float]:
        """The weights of the parts, scaled so that they sum to 1."""
        total = sum(part.weight for part in self.parts)
        return [part.weight / total for part in self.parts]

    def record(self) -> dict[str, Any]:
        """Each part's record by its title."""
        return {part.title: part.record() for part in self.parts}

    def with_tasks(self, change: Callable[[Task[Any]], Task[Any]]) -> "Mixture":
        """The mixture with `change` applied to every task."""
        return Mixture(tuple(replace(part, task=change(part.task)) for part in self.parts))


def mixture_of(flags: TaskSettings, limit: int, test_limit: int, **more: Any) -> Mixture | None:
    """The mixture that the flags ask for.

    Args:
        flags: The flags of tasks.
        limit: Search examples of a part without its own limit.
        test_limit: Held-out questions of a part without its own test_limit.
        more: Settings for every task that has them.

    Returns:
        The mixture, or None for a single task.

    Raises:
        UserError: The file is not a mixture, or a task is invalid.
    """
    if flags.data_folder is not None and flags.mixture is None:
        raise UserError("--data-folder is the folder of relative paths in --mixture; use --data for one task")
    if not flags.is_mixture:
        return None
    if flags.mixture is not None:
        return _from_file(flags, flags.mixture, limit, test_limit, more)
    return _from_names(flags, limit, test_limit, more)


def _from_names(flags: TaskSettings, limit: int, test_limit: int, more: Mapping[str, Any]) -> Mixture:
    names: Sequence[Any] = (flags.task,) if isinstance(flags.task, str) else flags.task
    flag = f"--task {' '.join(names)}"
    if len(set(names)) < len(names):
        raise UserError(f"{flag}: a task is repeated; to use several forms of one task, write a --mixture")
    settings = given(flags)
    if unknown := next((name for name in settings if not any(name in settings_of(task) for task in names)), None):
        raise UserError(f"{flag}: none of these tasks has --{_hyphens(unknown)}; remove it")
    file_tasks = [name for name in names if name not in GENERATED]
    if len(file_tasks) > 1 and "data" in settings:
        raise UserError(f"{flag}: one --data cannot serve {' and '.join(file_tasks)}; give each its own in a --mixture")
    parts: list[Part] = []
    for name in names:
        own = {key: value for key, value in settings.items() if key in settings_of(name)}
        if file_tasks and name in GENERATED:
            own.pop("data", None)
        _add(parts, name, own, limit, test_limit, 1.0, f"--task {name}", more)
    return Mixture(tuple(parts))


def _from_file(flags: TaskSettings, path: Path, limit: int, test_limit: int, more: Mapping[str, Any]) -> Mixture:
    named = ["task"] if flags.task != TaskSettings.task else []
    named += [name for name in SETTINGS if getattr(flags, name) != getattr(TaskSettings, name)]
    if named:
        raise UserError(
            f"--mixture {path} defines the tasks, so --{_hyphens(named[0])} cannot be a flag; write it into the file's blocks"
        )
    parts: list[Part] = []
    _add_blocks(parts, _SEARCHED, path, flags.data_folder, limit, test_limit, more)
    return Mixture(tuple(parts))


def other_parts(
    path: Path, flags: TaskSettings, tuned: Task[Any], limit: int, test_limit: int, **more: Any
) -> tuple[Part, tuple[Part, ...]]:
    """The tasks of `compare --other-tasks`, on which nothing is tuned.

    Args:
        path: The file.
        flags: The flags of tasks.
        tuned: The task that they ask for, which the file must not contain.
        limit: Search examples of the tuned task.
        test_limit: Held-out questions of the tuned task, and of a block without its own test_limit.
        more: Settings for every task that has them.

    Returns:
        The tuned task as a part, and the others. All titles differ.

    Raises:
        UserError: The file is not a list of tasks, or a task is invalid.
    """
    settings = given(flags)
    parts = [Part(_title(tuned.name, tuned, settings), tuned, limit, test_limit, 1.0, f"--task {tuned.name}", settings)]
    _add_blocks(parts, _MEASURED, path, flags.data_folder, 0, test_limit, more)
    return parts[0], tuple(parts[1:])


def _add_blocks(
    parts: list[Part],
    use: _Use,
    path: Path,
    data_folder: Path | None,
    limit: int,
    test_limit: int,
    more: Mapping[str, Any],
) -> None:
    """Append the tasks of a file to `parts`."""
    folder = data_folder or path.parent
    if not folder.is_dir():
        raise UserError(f"--data-folder {folder}: no such folder; paths in {use.flag} are relative to it")
    for number, block in enumerate(_blocks(use.flag, path), 1):
        where = f"{use.flag} {path}, block {number}"
        name, own, settings = _read(block, where, folder, use)
        where = f"{where} ({name})"
        for key, value in own.items():
            check_number(
                f"{where}: {key}", value, _WEIGHT if key == "weight" else BOUNDS[key], float if key == "weight" else int
            )
        sizes = own.get("limit", limit), own.get("test_limit", test_limit)
        _add(parts, name, settings, *sizes, float(own.get("weight", 1.0)), where, more, use)


def _add(
    parts: list[Part],
    name: Any,
    settings: dict[str, Any],
    limit: int,
    test_limit: int,
    weight: float,
    where: str,
    more: Mapping[str, Any],
    use: _Use = _SEARCHED,
) -> None:
    """Append the tasks of one block to `parts`."""
    if name == "perplexity":
        raise UserError(f"{where}: perplexity {use.perplexity}")
    try:
        tasks = make_tasks(name, settings, **more)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    for task in tasks:
        if same := next((part for part in parts if part.task == task), None):
            raise UserError(f"{where}: the task {same.title!r} is repeated; {use.repeated}")
        lengths = {key: _length_of(task, key) for key in LENGTHS if key in settings}
        title = _title(name, task, settings)
        same_titles = sum(part.title.split(" #")[0] == title for part in parts)
        title += f" #{same_titles + 1}" if same_titles else ""
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


def _blocks(flag: str, path: Path) -> list[dict[str, Any]]:
    try:
        content = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{flag} {path}: not TOML ({error})") from error
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{flag} {path}: cannot be read ({reason}); give a TOML file with one [[task]] block per task"
        ) from error
    if other_keys := [key for key in content if key != "task"]:
        raise UserError(f"{flag} {path}: {other_keys[0]} is not allowed; the file has only [[task]] blocks")
    blocks = content.get("task", [])
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, dict) for block in blocks):
        raise UserError(f"{flag} {path}: has no [[task]] block; give one per task, with its name as task")
    return blocks


def _read(block: dict[str, Any], where: str, folder: Path, use: _Use) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A block's task, the keys of the block itself (limit, test_limit, weight), and the task's settings."""
    name = block.get("task")
    if name not in TASKS:
        problem = "has no key task" if name is None else f"task = {name!r} is not known"
        raise UserError(f"{where}: {problem}; the tasks are: {', '.join(TASKS)}")
    hints = get_type_hints(TaskSettings)
    known = {key: hints[key] for key in SETTINGS if key in settings_of(name)}
    values: dict[str, Any] = {}
    for key, value in block.items():
        setting = key.replace("-", "_")
        if setting == "task":
            continue
        if setting in values:
            raise UserError(f"{where} ({name}): {key} is repeated, with a hyphen and with an underscore; give it once")
        hint = ({**use.keys} | known).get(setting)
        if hint is None and setting in _OWN:
            raise UserError(f"{where} ({name}): {key} is for a search, and nothing is tuned on other tasks; remove it")
        if hint is None:
            raise UserError(f"{where} ({name}): {key} is not one of its keys: task, {', '.join([*use.keys, *known])}")
        try:
            values[setting] = _typed(value, hint, folder)
            if isinstance(values[setting], Path):
                check_path(f"{where} ({name}): {key} = ", values[setting])
        except TypeError:
            raise UserError(f"{where} ({name}): {key} = {value!r} must be {_words(hint)}") from None
    settings = {key: value for key, value in values.items() if key not in _OWN and value is not False}
    return name, {key: value for key, value in values.items() if key in _OWN}, settings


def _typed(value: Any, hint: Any, folder: Path) -> Any:
    """Convert a TOML value to a flag's type. Raises TypeError if it has another type."""
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
            return tuple(_typed(entry, inner[0], folder) for entry in value)
    elif hint is Path:
        if isinstance(value, str) and value:
            return folder / value
    elif type(value) is hint:
        return value
    raise TypeError(f"{value!r} is not a {hint}")


def _words(hint: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if set(inner) == {int, float}:
            return _WORDS[float]
        options = [option for option in inner if option is not NoneType]
        return " or ".join(
            dict.fromkeys("a list of these" if get_origin(option) is tuple else _words(option) for option in options)
        )
    if origin is Literal:
        return "one of " + ", ".join(map(repr, inner))
    if origin is tuple:
        return f"a list of {_words(inner[0])}"
    return _WORDS[hint]


def file_stem(title: str) -> str:
    """A title as part of a file name."""
    return re.sub(r"\W+", "_", title).strip("_")


def _hyphens(name: str) -> str:
    return name.replace("_", "-")
