"""Make the tasks that flags ask for. The flags themselves are TaskSettings in lpes_jax/settings/groups.py."""

import re
from typing import Any

from lpes_jax.choices import TaskName
from lpes_jax.errors import UserError
from lpes_jax.settings.groups import Length, TaskSettings
from lpes_jax.tasks import make_task, settings_of
from lpes_jax.tasks.ranged import Ranged

ITEMS = {"kv": "key-value pairs", "mdqa": "documents", "needle": "sentences"}
SIZES = {
    **{"niah": ("num_lines", "lines"), "vt": ("num_lines", "lines"), "many_shot": ("num_shots", "examples")},
    **{"cwe": ("num_words", "words"), "fwe": ("num_words", "words")},
}
LENGTHS = ("num_pairs", "num_documents", "num_sentences", "num_lines", "num_words")
SETTINGS = tuple(name for name in TaskSettings().flat() if name not in ("task", "mixture", "data_folder"))


def task_of(flags: TaskSettings, **more: Any) -> Any:
    """The task that the flags ask for. Raises UserError as `make_task`, and if the flags ask for several tasks."""
    if flags.mixture is not None:
        raise UserError("--mixture is for a search; give a single --task with its flags here")
    if isinstance(flags.task, tuple) and len(flags.task) > 1:
        raise UserError(f"--task {' '.join(flags.task)}: several tasks are for a search; give one at a time here")
    first, *others = tasks_of(flags, **more)
    if others or isinstance(first, Ranged):
        flag = next(name for name in LENGTHS if isinstance(getattr(flags, name), str | tuple))
        raise UserError(f"--task {name_of(flags)}: one length at a time; give --{flag.replace('_', '-')} one number")
    return first


def name_of(flags: TaskSettings) -> TaskName:
    """The name of the single task. Raises UserError if there are several."""
    names = (flags.task,) if isinstance(flags.task, str) else flags.task
    if len(names) != 1:
        raise UserError(f"--task {' '.join(names) or 'without a name'}: give one task")
    return names[0]


def given(flags: TaskSettings) -> dict[str, Any]:
    """The task settings that the flags set. Raises UserError for a length without a number."""
    found = {name: getattr(flags, name) for name in SETTINGS}
    if empty := next((name for name in LENGTHS if found[name] == ()), None):
        raise UserError(f"--{empty.replace('_', '-')} without a number: give one, or remove the flag")
    return {name: value for name, value in found.items() if value is not None and value is not False and value != ()}


def tasks_of(flags: TaskSettings, **more: Any) -> list[Any]:
    """One task per length: several if `num_pairs` or another length has several values."""
    return make_tasks(name_of(flags), given(flags), **more)


def make_tasks(name: TaskName, settings: dict[str, Any], **more: Any) -> list[Any]:
    """The task `name`, once per length. `more` are further settings, used by tasks that have them."""
    settings, own = dict(settings), settings_of(name)
    if name == "kv":
        settings.setdefault("num_pairs", 50)
    settings |= {name: value for name, value in more.items() if value is not None and name in own}
    setting = next((name for name in LENGTHS if isinstance(settings.get(name), str | tuple)), None)
    if setting is None:
        return [make_task(name, **settings)]
    lengths = settings.pop(setting)
    lengths = lengths if isinstance(lengths, tuple) else (lengths,)
    if len(set(lengths)) < len(lengths):
        raise UserError(f"--{setting.replace('_', '-')} {' '.join(map(str, lengths))}: a length is repeated; give it once")
    return [_of_length(name, settings, setting, length) for length in lengths]


def _of_length(name: str, settings: dict[str, Any], setting: str, length: Length) -> Any:
    if isinstance(length, int):
        return make_task(name, **settings, **{setting: length})
    match = re.fullmatch(r"(\d+):(\d+)", length)
    if match is None or not 1 <= int(match[1]) < int(match[2]):
        flag = f"--{setting.replace('_', '-')}"
        raise UserError(f"{flag} {length!r} is neither a number nor a range from a lower to a higher one, such as 5:20")
    return Ranged(make_task(name, **settings, **{setting: int(match[2])}), setting, int(match[1]))


def title_of(flags: TaskSettings, task: Any) -> str:
    """The task's title in plots and tables: `10 documents`, `5 to 20 documents`, `zero_scrolls qasper`."""
    name = name_of(flags)
    if name in SIZES:
        setting, items = SIZES[name]
        longest: Any = task.longest if isinstance(task, Ranged) else task
        low = f"{task.low} to " if isinstance(task, Ranged) else ""
        return " ".join([name, *([longest.subset] if name == "niah" else []), f"{low}{getattr(longest, setting)} {items}"])
    if name in ITEMS:
        return f"{f'{task.low} to ' if isinstance(task, Ranged) else ''}{task.num_items} {ITEMS[name]}"
    return f"{name} {flags.subset or ''}".strip()
