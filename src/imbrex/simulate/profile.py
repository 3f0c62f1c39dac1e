"""A profile: seconds and rates of a machine, each with its source."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

STATUSES = ("measured", "fitted", "assumed")
SHIPPED = Path(__file__).parent / "profiles"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A figure in SI units. status: `measured`, `fitted` to measurements, or `assumed`. source: the command
    or file it comes from, or why it is assumed."""

    value: float
    status: str
    source: str

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"profile: status {self.status!r}; use one of {', '.join(STATUSES)}")


RATES = ("bytes_s", "flops_s", "values_s", "_ranks", "_rows", "_columns", "multiprocessors", "_bytes")
"""Ends of the names of figures that something is divided by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Figures of one device by name, and of its transports and codecs. machine: which machine was measured.
    most_ranks: the most ranks that were measured; predictions for more extrapolate."""

    machine: str
    most_ranks: int
    entries: Mapping[str, Entry]

    def __post_init__(self) -> None:
        for name, entry in self.entries.items():
            value, least = entry.value, "above 0" if name.partition(":")[0].endswith(RATES) else "from 0 up"
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and least == "above 0"):
                raise ValueError(f"profile: {name} is {value!r}; a finite number {least} is wanted")

    def __getitem__(self, name: str) -> float:
        if name not in self.entries:
            raise ValueError(
                f"profile: {self.machine} has no {name!r}; measure it with `imbrex profile`, or add it "
                "with its source"
            )
        return self.entries[name].value

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def with_entries(self, more: Mapping[str, Entry]) -> Profile:
        """This profile with some figures replaced or added."""
        return Profile(machine=self.machine, most_ranks=self.most_ranks, entries={**self.entries, **more})

    def save(self, path: Path | str) -> None:
        content = {
            "machine": self.machine,
            "most_ranks": self.most_ranks,
            "entries": {name: asdict(entry) for name, entry in self.entries.items()},
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path | str) -> Profile:
        """Read a profile from a file, or one that comes with imbrex by its name.

        Raises ValueError if there is none, or the file is no profile.
        """
        file = Path(path)
        if not file.suffix and not file.exists():
            file = SHIPPED / f"{path}.json"
        if not file.exists():
            names = ", ".join(shipped_profiles())
            raise ValueError(f"profile: {path} is not there; give a file of `imbrex profile`, or {names}")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            return Profile(
                machine=content["machine"],
                most_ranks=content["most_ranks"],
                entries={name: Entry(**entry) for name, entry in content["entries"].items()},
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"profile: {path} is no profile ({error!r}); measure it again") from None


def shipped_profiles() -> list[str]:
    """The names of the profiles that come with the library."""
    return sorted(file.stem for file in SHIPPED.glob("*.json"))


__all__ = ["SHIPPED", "STATUSES", "Entry", "Profile", "shipped_profiles"]
