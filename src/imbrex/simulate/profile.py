"""A profile: seconds and rates of a machine, each with its source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from imbrex.runtime.checks import UNREADABLE, why

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


MOST = 1e30
"""The largest figure, and one over the smallest that something is divided by: seconds are finite then."""
DIVISORS = {
    ("_ranks", "_rows", "_columns", "multiprocessors", "_bytes"): (1.0, "a whole number from 1 up"),
    ("_exponent",): (1.0, "a number from 1 up"),
    ("bytes_s", "flops_s", "values_s", "_slows_compute", "_slows_moves"): (1 / MOST, "a number above 0"),
    ("_a_multiprocessor",): (1 / MOST, "a number above 0"),
}
"""The least of figures that something is divided by, and what they are, by the ends of their names."""


def _check(name: str, value: Any) -> None:
    """Raise ValueError where a figure is none that seconds can be computed from."""
    end = name.partition(":")[0]
    least, kind = next(
        (rule for ends, rule in DIVISORS.items() if end.endswith(ends)), (0, "a number from 0 up")
    )
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= MOST or ("whole" in kind and value % 1):
        raise ValueError(f"profile: {name} is {value!r:.80}; {kind} is wanted, at most 1e30")


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Figures of one device by name, and of its transports and codecs. machine: which machine was measured.
    most_ranks: the most ranks that were measured; predictions for more extrapolate."""

    machine: str
    most_ranks: int
    entries: Mapping[str, Entry]

    def __post_init__(self) -> None:
        _check("most_ranks", self.most_ranks)
        for name, entry in self.entries.items():
            _check(name, entry.value)

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
        except UNREADABLE as error:
            if str(error).startswith("profile: "):
                raise
            raise ValueError(f"profile: {path} is no profile ({why(error)}); measure it again") from None


def shipped_profiles() -> list[str]:
    """The names of the profiles that come with the library."""
    return sorted(file.stem for file in SHIPPED.glob("*.json"))


__all__ = ["SHIPPED", "STATUSES", "Entry", "Profile", "shipped_profiles"]
