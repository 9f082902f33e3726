"""Parse the arguments of a verb into its settings, or return its help.

tyro builds the parser from the settings' classes. Some flags determine the defaults of others (`--preset`, together with
`--algorithm` and `--mixture`). In that case all arguments are parsed a second time with these defaults. This code never
searches the arguments itself: tyro handles order and spelling (`--preset best`, `--preset=best`).
"""

import contextlib
import errno
import io
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro

from lpes_jax.errors import UserError
from lpes_jax.help import short_help
from lpes_jax.settings import Settings
from lpes_jax.settings.groups import HostSettings
from lpes_jax.settings.tree import unmet

Flags = TypeVar("Flags", bound=Settings)
_SHORT, _ALL = ("-h", "--help"), "--help-all"
_EMPTY = Path()  # the parsed value of an empty text; compared by identity
_REGISTRY = tyro.constructors.ConstructorRegistry()


@dataclass(frozen=True)
class Parsed(Generic[Flags]):
    """The settings of a verb, the settings of its processes, and the defaults of flags that were not given."""

    flags: Flags
    hosts: HostSettings
    defaults: Flags

    def has(self, name: str) -> bool:
        """Whether this path flag was given. A default is passed on as the same object; a parsed path is a new object."""
        return self.flags.flat()[name] is not self.defaults.flat()[name]


@dataclass(frozen=True)
class Parser(Generic[Flags]):
    """A parser of settings with `defaults`; with `many_hosts` it also parses the flags of several processes."""

    defaults: Flags
    prog: str
    manual: str
    many_hosts: bool = False

    def parse(self, arguments: Sequence[str]) -> Parsed[Flags]:
        """The settings. Raises UserError for invalid flags."""
        given, hosts = self._settings(self.defaults, arguments)
        defaults = self.defaults.defaults_with(given)
        if defaults != self.defaults:
            given, hosts = self._settings(defaults, arguments)
        _check_paths(given)
        _check_effect(given, defaults)
        return Parsed(given, hosts, defaults)

    def help(self, arguments: Sequence[str]) -> str | None:
        """The help that the arguments ask for, or None.

        It depends on the other arguments. If these cannot be parsed (`--num-pairs --help`), the last flag is ignored; if that
        does not help, all are.
        """
        asked = [argument.replace("_", "-") for argument in arguments]
        asked = {argument for argument in asked if argument in (*_SHORT, _ALL)}
        if not asked:
            return None
        rest = [argument for argument in arguments if argument.replace("_", "-") not in asked]
        last = max((number for number, argument in enumerate(rest) if argument.startswith("--")), default=0)
        given = Parsed(self.defaults, HostSettings(), self.defaults)
        for part in (rest, rest[:last]) if rest else ():  # nothing is given: nothing to parse
            with contextlib.suppress(UserError):
                given = self.parse(part)
                break
        width = max(40, shutil.get_terminal_size().columns)  # tyro does not terminate on very narrow terminals
        if _ALL in asked:
            return self._all_flags(given.defaults, width)
        left_out = len(HostSettings().flat()) if self.many_hosts else 0
        return short_help(given.defaults, given.flags, self.prog, self.manual, width, left_out)

    def _settings(self, defaults: Flags, arguments: Sequence[str]) -> tuple[Flags, HostSettings]:
        # tyro prints an error as a box; its first paragraph becomes our one line. No terminal: no colours, no wraps.
        box, nowhere = io.StringIO(), io.TextIOWrapper(io.BytesIO(), "utf-8")
        try:
            with contextlib.redirect_stderr(box), contextlib.redirect_stdout(nowhere), _columns(100_000):
                return self._tyro(defaults, arguments)
        except SystemExit:
            lines = [line.strip("│╭╮╰╯─ \n") for line in box.getvalue().split("────", 2)[-1].splitlines()]
            text = " ".join(re.split(r"\n\s*\n", "\n".join(lines).strip())[0].split())
            raise UserError(f"{_in_words(text)} (see {self.prog} --help)") from None

    def _all_flags(self, defaults: Flags, width: int) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as page, _columns(width), contextlib.suppress(SystemExit):
            self._tyro(defaults, ["--help"])
        return page.getvalue()

    def _tyro(self, defaults: Flags, arguments: Sequence[str]) -> tuple[Flags, HostSettings]:
        options: dict[str, Any] = {"prog": self.prog, "description": self.manual, "args": list(arguments)}
        options |= {"config": (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes), "registry": _REGISTRY}
        if not self.many_hosts:
            return tyro.cli(type(defaults), default=defaults, **options), HostSettings()
        verb, hosts = tyro.conf.arg(name=""), tyro.conf.arg(name="many-hosts")
        both = tuple[Annotated[type(defaults), verb], Annotated[HostSettings, hosts]]
        return tyro.cli(both, default=(defaults, HostSettings()), **options)


_UNPARSED = {  # tyro's errors, and ours
    r"Error parsing (--\S+): invalid literal for int\(\) with base 10: (.*)": r"\1 must be a whole number, got \2",
    r"Error parsing (--\S+): could not convert string to float: (.*)": r"\1 must be a number, got \2",
    r"Error parsing (--\S+): Could not find valid parse for arguments: \[(.*)\]": r"\1 does not take \2",
    r"Error parsing (--\S+): no type matching .* could be instantiated from \[(.*)\]\.": r"\1 does not take \2",
}


def _in_words(error: str) -> str:
    """tyro's error about a value, in the words of our own."""
    for pattern, words in _UNPARSED.items():
        if found := re.fullmatch(pattern, error):
            return found.expand(words)
    return error


@_REGISTRY.primitive_rule
def _path(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Path] | None:
    """The parser of paths, which distinguishes an empty text from the working directory."""
    if info.type is not Path:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda texts: Path(texts[0]) if texts[0] else _EMPTY,
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    )


@contextlib.contextmanager
def _columns(count: int) -> Iterator[None]:
    """Inside this context the terminal has `count` columns."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(count)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def _check_effect(given: Settings, defaults: Settings) -> None:
    """Raise UserError for a flag that has no effect with another one. The flags of a task are checked by `make_task`."""
    chosen, own, others = given.chosen(), given.flat(), defaults.flat()
    for name, conditions in given.conditions().items():
        wanted = {deciding: values for deciding, values in conditions.items() if deciding != "task"}
        if own[name] != others[name] and (found := unmet(wanted, chosen)):
            flag, other = (f"--{part.replace('_', '-')}" for part in (name, found[0]))
            raise UserError(f"{flag} has no effect with {other} {' '.join(map(str, found[1]))}; remove it, or change {other}")


def _check_paths(flags: Settings) -> None:
    """Raise UserError for a path that is too long, or empty, which Python reads as the working directory."""
    for name, path in flags.flat().items():
        flag = "--" + name.replace("_", "-")
        if not isinstance(path, Path):
            continue
        if path is _EMPTY:
            raise UserError(f"{flag}: give a path, not an empty text")
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise UserError(f"{flag} {str(path):.60}...: {error.strerror}; give another path") from error
