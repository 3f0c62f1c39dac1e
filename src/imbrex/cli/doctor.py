"""`imbrex doctor`: versions, devices, links, and which pieces work on this machine; each is tried."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from imbrex.bench.machine import devices, links, versions
from imbrex.runtime.waits import timeout_seconds

ROOMS = {"transport": "transports", "codec": "codecs", "strategy": "strategies"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="until two trial ranks give up (60)"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 0 where all that the processor needs works, else 1; what needs a GPU never fails it."""
    from imbrex.testing.trials import try_everything

    args.timeout = timeout_seconds(args.timeout)
    report: dict[str, Any] = {"versions": versions(), "devices": devices(), "links": links()}
    rows: list[dict[str, Any]] = []

    def remembered() -> Iterable[dict[str, Any]]:
        for finding in try_everything(args.timeout):
            rows.append(asdict(finding))
            yield rows[-1]

    if args.json:
        print(json.dumps({**report, "checks": list(remembered())}, indent=2))
    else:
        # A line as soon as it is known: compiling kernels and starting NCCL takes its time.
        for line in _lines({**report, "checks": remembered()}):
            print(line, flush=True)
    broken = [check for check in rows if check["device"] == "cpu" and not check["works"]]
    return 1 if broken else 0


def _lines(report: dict[str, Any]) -> Iterable[str]:
    yield "versions"
    yield "  " + "  ".join(f"{name} {number}" for name, number in report["versions"].items())
    yield "devices"
    for device in report["devices"]:
        facts = [f"{value} {name}" for name, value in device.items() if name not in ("kind", "name")]
        yield f"  {device['kind']:5} {device['name']}: {', '.join(facts).replace('memory_gib', 'GiB')}"
    yield "links"
    if not report["links"]:
        yield "  none between devices: one GPU at most, and no RDMA device"
    for link in report["links"]:
        if "between" in link:
            a, b = link["between"]
            reach = "" if link["peer_access"] else ", no peer access"
            yield f"  gpu {a} - gpu {b}: {link['via']}{reach}"
        else:
            yield f"  network {link['network']}: {link['via']}"
    room: str = ""
    for check in _families(report["checks"]):
        if check["room"] != room:
            room = str(check["room"])
            yield ROOMS.get(room) or room
        mark = "works" if check["works"] else "  -  "
        yield f"  {mark}  {check['name']:14} {check['device']:5} {check['why']}"


def _families(checks: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Neighbours such as zfp1d-4, zfp1d-5, ... that end alike, as one: zfp1d-4..16."""
    for (family, *_), group in itertools.groupby(checks, key=_family):
        if not family:
            yield from group
            continue
        members = list(group)
        first, last = members[0], members[-1]
        if len(members) > 1:
            number = last["name"].rpartition("-")[2]
            why = f"{first['why']} .. {last['why']}" if first["why"] != last["why"] else first["why"]
            yield {**first, "name": f"{first['name']}..{number}", "why": why}
        else:
            yield from members


def _family(check: dict[str, Any]) -> tuple[Any, ...]:
    """The name before `-NUMBER`, or nothing; with what else must be the same."""
    stem, dash, number = check["name"].rpartition("-")
    family = stem if dash and number.isdecimal() else ""
    return family, check["room"], check["device"], check["works"]
