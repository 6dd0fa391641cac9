"""Numbers for names (tenants, endpoints): columns hold integers."""

from __future__ import annotations


class Names:
    """Gives each name a number below `limit`, for as long as the executor lives; what comes later shares the last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []

    def number(self, name: str) -> int:
        """The number of a name; a new one if it is new."""
        number = self._numbers.get(name)
        if number is None:
            if len(self._names) == self._limit:
                return self._limit - 1
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
        return number

    def name(self, number: int) -> str:
        """The name of a number."""
        return self._names[number]

    def __len__(self) -> int:
        return len(self._names)
