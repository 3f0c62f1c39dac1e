"""Ranks on this machine: on a two-tier network of namespaces where the user may make one, else plain.

    measured, ran_on = on_ranks("layers", settings, Network(nodes=2, ranks_per_node=2, inter="1gbit"))

runs `imbrex.reproduce.layers.on_rank(settings)` on four ranks and returns what the first of them returned.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from imbrex.launch.memory import check_memory
from imbrex.launch.parent import end_with_parent
from imbrex.runtime.waits import leave

MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""glibc keeps what is freed. Else every tensor of a megabyte is new memory, which the kernel clears: 70 to 90
of 1200 ms of processor time in a step of 2048 tokens of width 512 on four ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A network of nodes. inter, intra: limits of a node's link and its loopback, as tc writes them; `none`
    is no limit."""

    nodes: int
    ranks_per_node: int
    inter: str = "1gbit"
    intra: str = "none"

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def rates(self) -> str:
        inside = "" if self.intra == "none" else f", {self.intra} inside"
        return f"{self.inter} between nodes{inside}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RanOn:
    """The stage of a run: the network asked for or, because of `why_not`, ranks plain beside each other."""

    network: Network
    why_not: str | None = None

    @property
    def case(self) -> dict[str, Any]:
        """The part of a result row's case that says where it ran."""
        name, rates = ("netlab", self.network.rates) if self.why_not is None else ("loopback", "no limit")
        nodes, size = self.network.nodes, self.network.ranks_per_node
        return {"nodes": nodes, "ranks_per_node": size, "network": name, "rates": rates}

    def __str__(self) -> str:
        if self.why_not is not None:
            return f"loopback ({self.why_not})"
        return f"netlab {self.network.nodes} x {self.network.ranks_per_node}, {self.network.rates}"


def on_ranks(
    job: str, settings: Mapping[str, Any], network: Network, *, timeout_s: float = 300.0
) -> tuple[Any, RanOn]:
    """Run `on_rank` of the module `job` of this room on every rank; rank 0's result, and what it ran on.

    Raises RuntimeError with the ranks' last words where they failed, and ValueError for more of them than
    this machine can hold.
    """
    check_memory(network.size)
    # To standard error: the finding alone is what a command prints.
    sys.stderr.write(f"measuring {job}: {network.size} ranks, {timeout_s:g} s at most\n")
    with tempfile.TemporaryDirectory(prefix="imbrex-") as folder:
        request, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        request.write_text(json.dumps(settings))
        words = [sys.executable, "-m", "imbrex.reproduce.stage", job, str(request), str(answer)]
        why_not = _on_netlab(words, network, timeout_s)
        if why_not is not None:
            _on_loopback(words, network, timeout_s)
        return json.loads(answer.read_text()), RanOn(network=network, why_not=why_not)


def _on_netlab(words: list[str], network: Network, timeout_s: float) -> str | None:
    """Run the words on such a network: why there is none here, or `None` once it ran."""
    options = [
        *("--nodes", str(network.nodes), "--ranks-per-node", str(network.ranks_per_node)),
        *("--inter", network.inter, "--intra", network.intra, "--timeout", str(timeout_s)),
    ]
    command = [sys.executable, "-m", "imbrex", "netlab", "run", *options, "--", *words]
    environment = MEMORY | dict(os.environ)
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s + 30
    )
    if ran.returncode == 0:
        return None
    last = (ran.stderr.strip().splitlines() or ["no words"])[-1]
    if ran.returncode == 2 and "netlab:" in last:
        return last.split("netlab:", 1)[1].strip().split(";")[0]
    raise RuntimeError(f"the ranks ended with code {ran.returncode}: {last}")


def _on_loopback(words: list[str], network: Network, timeout_s: float) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(network.size):
        ours = {
            "RANK": rank,
            "WORLD_SIZE": network.size,
            "LOCAL_RANK": rank % network.ranks_per_node,
            "LOCAL_WORLD_SIZE": network.ranks_per_node,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        environment = MEMORY | os.environ | {name: str(value) for name, value in ours.items()}
        processes.append(subprocess.Popen(words, env=environment, preexec_fn=end_with_parent))
    try:
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"the ranks ended with codes {codes}")


def main() -> None:
    """Be one rank."""
    job, request, answer = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = importlib.import_module(f"imbrex.reproduce.{job}").on_rank(
        json.loads(Path(request).read_text())
    )
    if dist.get_rank() == 0:
        Path(answer).write_text(json.dumps(results))
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
