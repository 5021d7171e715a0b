"""What may be named in a recipe: entries by name, some under further names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from hybridflow.recipe.names import nearest

Entry = TypeVar("Entry")
_NAME = re.compile(r"[^\W\d][\w-]*")


class UnknownName(ValueError, KeyError):
    """A name that a registry does not hold; the message lists those that it does."""

    __str__ = ValueError.__str__


class Registry(Mapping[str, Entry], Generic[Entry]):
    """Entries by name. An alias finds its entry everywhere, but is not listed as a name.

    Args:
        kind: what an entry is, for messages.
        tables: entries by name; a name in two of them is an error.
        aliases: alias -> name.

    Raises:
        ValueError: a name or an alias is registered twice, or an alias names nothing.
    """

    def __init__(
        self,
        kind: str,
        *tables: Mapping[str, Entry],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.aliases: dict[str, str] = {}
        self._entries: dict[str, Entry] = {}
        for table in tables:
            for name, entry in table.items():
                self.register(name, entry)
        for alias, name in (aliases or {}).items():
            self._alias(alias, name)

    def register(self, name: str, entry: Entry, *aliases: str) -> Entry:
        """Add an entry; gives it back."""
        self._free(name)
        self._entries[name] = entry
        for alias in aliases:
            self._alias(alias, name)
        return entry

    def canonical(self, name: str) -> str:
        """The name that ``name`` is an alias of; itself where it is none, or unknown."""
        return self.aliases.get(name, name)

    def unknown(self, name: str) -> str:
        """What is wrong with a name that is not registered, and which names are."""
        return f"unknown {self.kind} '{name}'; {self.advice(name)}"

    def advice(self, name: str) -> str:
        """The nearest valid name, and all of them."""
        close = nearest(name, [*self._entries, *self.aliases])
        names = ", ".join(sorted(self))
        return f"did you mean '{close}'? Valid: {names}" if close else f"valid: {names}"

    def __getitem__(self, name: str) -> Entry:
        try:
            return self._entries[self.canonical(name)]
        except KeyError:
            raise UnknownName(self.unknown(name)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self.aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _alias(self, alias: str, name: str) -> None:
        if name not in self._entries:
            raise ValueError(f"the alias '{alias}' is for no entry: {self.unknown(name)}")
        self._free(alias)
        self.aliases[alias] = name

    def _free(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is no name for a {self.kind}: it has letters, digits, '_' and '-'"
            )
        if name in self:
            raise ValueError(f"the {self.kind} '{name}' is registered twice; give one another name")
