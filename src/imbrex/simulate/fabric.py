"""The links between ranks, tier by tier: an island of NVLink, a rail or rack, a spine.

A fabric file is YAML (with PyYAML), TOML or JSON:

    name: two racks
    tiers:
      - {name: nvlink, ranks: 8, gbytes_s: 320, start_us: 2}
      - {name: rail, ranks: 256, gbytes_s: 45, start_us: 3, latency_us: 5}
      - {name: spine, oversubscription: 4}

`ranks` are those below one switch of the tier, `gbytes_s` the bytes a second that one rank sends there
while it receives as many. A tier without a rate has the one below, divided by `oversubscription`.
`port_ranks` ranks share one port, whose rate it then is. The last tier without `ranks` holds all.
"""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imbrex.runtime.checks import UNREADABLE, why
from imbrex.simulate.profile import MOST, STATUSES, Profile

WORDS = {"name", "status", "source"}
KNOWN = WORDS | {"ranks", "gbytes_s", "start_us", "latency_us", "oversubscription", "port_ranks"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """The links of one tier. ranks: below one of its switches. bytes_s: bytes per second of a rank if all
    ranks send, oversubscription included. start: seconds per message. latency: seconds until the first
    byte arrives."""

    name: str
    ranks: int
    bytes_s: float
    start: float = 0.0
    latency: float = 0.0
    port_ranks: int = 1
    status: str = "assumed"
    source: str = "the fabric file"

    def seconds(self, nbytes: float, messages: float, sharing: int = 1) -> float:
        """Seconds of a rank's messages; `sharing` ranks of its node send as much at the same time."""
        if not messages:
            return 0.0
        return self.latency + messages * self.start + nbytes * min(sharing, self.port_ranks) / self.bytes_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """Tiers of links, the nearest first. A switch of each tier connects whole switches of the tier below."""

    name: str
    tiers: tuple[Tier, ...]

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ValueError(f"fabric: {self.name} has no tiers; give at least one")
        below = 1
        for tier in self.tiers:
            if tier.ranks % below or tier.ranks < 1:
                raise ValueError(
                    f"fabric: tier {tier.name} has {tier.ranks} ranks, which is no multiple of the {below} "
                    "below; a switch holds whole switches"
                )
            if not tier.bytes_s > 0:
                raise ValueError(f"fabric: tier {tier.name} moves {tier.bytes_s} bytes a second; above 0")
            below = tier.ranks

    @property
    def node(self) -> int:
        """Ranks of a node: of the nearest tier."""
        return self.tiers[0].ranks

    def sizes(self, group: int) -> list[int]:
        """How many ranks of a group of neighbours stand below one switch, tier by tier."""
        return [min(group, tier.ranks) for tier in self.tiers]

    def peers(self, group: int) -> list[int]:
        """How many of a rank's peers it reaches over each tier, and over none below. Raises ValueError where
        the group does not fit.

        Example: tiers of 4 and 16 ranks, a group of 8: 3 peers near, 4 beyond.
        """
        if group > self.tiers[-1].ranks:
            raise ValueError(
                f"fabric: {self.name} holds {self.tiers[-1].ranks} ranks, not {group}; add a tier"
            )
        sizes = [1, *self.sizes(group)]
        return [size - below for below, size in itertools.pairwise(sizes)]

    @staticmethod
    def read(path: Path | str, world: int) -> Fabric:
        """Read a fabric file. world: ranks that a last tier without `ranks` holds.

        Raises ValueError, one sentence, where it is none.
        """
        path = Path(path)
        if not path.exists():
            raise ValueError(f"fabric: {path} is not there; give a YAML, TOML or JSON file")
        try:
            return parse(_content(path), world)
        except UNREADABLE as error:
            if str(error).startswith("fabric: "):
                raise
            raise ValueError(f"fabric: {path} cannot be read ({why(error)})") from None


def parse(content: Mapping[str, Any], world: int) -> Fabric:
    """The fabric that a file's content describes."""
    lines = content.get("tiers") if isinstance(content, Mapping) else None
    if not isinstance(lines, Sequence) or not lines or not all(isinstance(line, Mapping) for line in lines):
        raise ValueError("fabric: no tiers; give a list of them under `tiers`, each with its settings")
    tiers: list[Tier] = []
    for place, line in enumerate(lines):
        strange = sorted(map(str, set(line) - KNOWN))
        if strange:
            raise ValueError(f"fabric: tier {place} has {strange[0]!r}; known are {', '.join(sorted(KNOWN))}")
        tiers.append(_tier(line, tiers, last=place == len(lines) - 1, world=world))
    return Fabric(name=str(content.get("name", "fabric")), tiers=tuple(tiers))


def _tier(line: Mapping[str, Any], below: Sequence[Tier], *, last: bool, world: int) -> Tier:
    name = str(line.get("name", f"tier {len(below)}"))
    if "gbytes_s" not in line and not below:
        raise ValueError(f"fabric: tier {name} has no `gbytes_s`, and none below; give its rate")
    if "ranks" not in line and not last:
        raise ValueError(f"fabric: tier {name} has no `ranks`; only the last one holds all there are")
    status = str(line.get("status", "assumed"))
    if status not in STATUSES:
        raise ValueError(f"fabric: tier {name} has status {status!r}; use {', '.join(STATUSES)}")
    under = below[-1] if below else Tier(name="", ranks=1, bytes_s=0.0)
    settings = {
        "ranks": math.ceil(max(world, under.ranks) / under.ranks) * under.ranks,
        "gbytes_s": under.bytes_s / 1e9,
        "oversubscription": 1,
        "start_us": 1e6 * under.start,
        "latency_us": 1e6 * under.latency,
        "port_ranks": 1,
    } | {key: _number(name, key, value) for key, value in line.items() if key not in WORDS}
    return Tier(
        name=name,
        ranks=int(settings["ranks"]),
        bytes_s=1e9 * settings["gbytes_s"] / settings["oversubscription"],
        start=1e-6 * settings["start_us"],
        latency=1e-6 * settings["latency_us"],
        port_ranks=int(settings["port_ranks"]),
        status=status,
        source=str(line.get("source", "the fabric file")),
    )


def _number(tier: str, key: str, value: Any) -> float:
    """The number that a setting of a tier is. Raises ValueError if it is none, or one that makes no sense."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if key in ("ranks", "port_ranks"):
        right, kind = number >= 1 and not number % 1, "a whole number from 1 up"
    elif key in ("start_us", "latency_us"):
        right, kind = number >= 0, "a number from 0 up"
    else:
        right, kind = number > 0, "a number above 0"
    if not right or number > MOST or 0 < number < 1 / MOST:
        text = "; it is text, as 1e3 is in YAML: write 1000" if isinstance(value, str) else ""
        raise ValueError(f"fabric: tier {tier} has {key} {value!r:.80}; give {kind}{text}")
    return number


def _content(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix == ".json":
        return json.loads(text)
    try:
        import yaml
    except ImportError:
        raise ValueError(
            f"fabric: {path} is YAML, and PyYAML is not installed; install imbrex[yaml], or write it as JSON"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"fabric: {path} is no YAML ({str(error).splitlines()[0]})") from None


def islands(profile: Profile, world: int, size: int, *, network: str = "network") -> Fabric:
    """A fabric of nodes of `size` ranks: inside nodes with the rates of a profile, and between them with
    those that the profile has as `network`."""

    def tier(name: str, kind: str, ranks: int) -> Tier:
        entry = profile.entries[f"{kind}_bytes_s"]
        return Tier(
            name=name,
            ranks=ranks,
            bytes_s=entry.value,
            start=profile[f"{kind}_start_s"],
            latency=profile[f"{kind}_latency_s"],
            port_ranks=int(profile[f"{kind}_port_ranks"]),
            status=entry.status,
            source=entry.source,
        )

    inside = tier("node", "node", size)
    if world <= size:
        return Fabric(name=f"one node of {size}", tiers=(inside,))
    across = tier("network", network, math.ceil(world / size) * size)
    return Fabric(name=f"nodes of {size}", tiers=(inside, across))


__all__ = ["Fabric", "Tier", "islands", "parse"]
