"""Trees of flags: each flag is found by its name alone, whichever group it is in."""

import dataclasses
from typing import Any, TypeVar

Tree = TypeVar("Tree", bound="Settings")


@dataclasses.dataclass(frozen=True)
class Settings:
    """A group of flags, or a tree of such groups. No two flags of a tree have the same name, and each has a default."""

    @classmethod
    def of(cls: type[Tree], **flags: Any) -> Tree:
        """The defaults with other values of some flags. Raises TypeError for a name that is no flag of this tree."""
        return cls().replace(**flags)

    def replace(self: Tree, **flags: Any) -> Tree:
        """The same with other values of some flags. Raises TypeError for a name that is no flag of this tree."""
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
        """The values of all flags by their names, group after group."""
        found: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            found |= value.flat() if isinstance(value, Settings) else {field.name: value}
        return found
