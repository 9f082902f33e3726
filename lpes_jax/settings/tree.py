"""Trees of flags. A flag is found by its name, whichever group it is in.

The definition of a flag says when the short `--help` shows it (`lpes_jax.help` reads this):

    limit: int = 500                                  # always shown
    num_pairs: int | None = when(None, task="kv")     # shown with --task kv
    crossover_tries: int = rare(4)                    # shown only by --help-all

`--help` shows the first line of the docstring below a flag, which is a sentence; `--help-all` shows all of it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

SettingsTree = TypeVar("SettingsTree", bound="Settings")
WHEN, SHOWN, RARE = "when", "shown", "rare"  # in the metadata of a field


def when(default: Any, **flags: str | tuple[str, ...]) -> Any:
    """A flag or group for certain values of others: each of `flags` has the given value, or one of the given values.

    With other values `--help` does not show it, and giving it is refused, because it has no effect.
    """
    return dataclasses.field(default=default, metadata={WHEN: _values(flags)})


def shown(default: Any, **flags: str | tuple[str, ...]) -> Any:
    """The same for a flag that has an effect with other values too: only `--help` leaves it out."""
    return dataclasses.field(default=default, metadata={SHOWN: _values(flags)})


def _values(flags: dict[str, str | tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {name: (value,) if isinstance(value, str) else value for name, value in flags.items()}


def unmet(conditions: Mapping[str, tuple[str, ...]], chosen: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]] | None:
    """The first flag of `conditions` that has none of its values, with those that it has; None if all are met."""
    for name, values in conditions.items():
        found = chosen[name] if isinstance(chosen[name], tuple) else (chosen[name],)
        if not set(found) & set(values):
            return name, found
    return None


def rare(default: Any) -> Any:
    """A flag or group that only `--help-all` shows."""
    return dataclasses.field(default=default, metadata={RARE: True})


@dataclasses.dataclass(frozen=True)
class Settings:
    """A group of flags, or a tree of such groups. No two flags of a tree have the same name, and each has a default."""

    @classmethod
    def of(cls: type[SettingsTree], **flags: Any) -> SettingsTree:
        """The defaults with other values of some flags. Raises TypeError if a name is not a flag of this tree."""
        return cls().replace(**flags)

    def replace(self: SettingsTree, **flags: Any) -> SettingsTree:
        """The same with other values of some flags. Raises TypeError if a name is not a flag of this tree."""
        if unknown := [name for name in flags if name not in self.flat()]:
            raise TypeError(f"{type(self).__name__} has no flag {unknown[0]!r}")
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Settings):
                changes |= {field.name: flags[field.name]} if field.name in flags else {}
            elif own := {name: flags[name] for name in value.flat() if name in flags}:
                changes[field.name] = value.replace(**own)
        return dataclasses.replace(self, **changes)

    def flat(self) -> dict[str, Any]:
        """The values of all flags by name, in the order of the groups."""
        found: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            found |= value.flat() if isinstance(value, Settings) else {field.name: value}
        return found

    def conditions(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """The flags that have an effect only with some values of others: by name, the values of each of these (`when`)."""
        found: dict[str, dict[str, tuple[str, ...]]] = {}
        for field in dataclasses.fields(self):
            value, own = getattr(self, field.name), field.metadata.get(WHEN, {})
            below: dict[str, dict[str, tuple[str, ...]]] = {field.name: {}}
            if isinstance(value, Settings):
                below = dict.fromkeys(value.flat(), {}) | value.conditions()
            found |= {name: own | conditions for name, conditions in below.items() if own or conditions}
        return found

    def defaults_with(self: SettingsTree, given: Any) -> SettingsTree:
        """These defaults, changed as the flags of `given` demand; in a search: by its preset."""
        return self

    def chosen(self) -> dict[str, Any]:
        """The flags whose values determine what `--help` shows."""
        return self.flat()
