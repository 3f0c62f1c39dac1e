"""An emulated network of two tiers on one machine: `imbrex netlab run --nodes 2 --ranks-per-node 4 --inter
1gbit -- train.py`.

Every node is a network namespace with one link to a switch, whose rate is limited by a token bucket in both
directions. Nothing is attached to the host's network, and there is no default route. All namespaces belong to
one `unshare`d process: when it ends, however it ends, the kernel removes everything.

With `--gpus` a node is a subset of this machine's GPUs that NCCL takes for a host (`NCCL_HOSTID`): it uses
sockets between nodes, at their own rate, and NVLink or PCIe inside.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from imbrex.launch.memory import check_memory
from imbrex.launch.parent import end_with_parent
from imbrex.runtime.waits import MAX_TIMEOUT_S

EXIT_LATE = 124
GRACE_S = 2.0
"""Seconds that other ranks have to report after one has failed."""
INSIDE = "IMBREX_NETLAB_INSIDE"
RATE = re.compile(r"(?=.*[1-9])\d+(\.\d+)?[kmg]?bit", re.IGNORECASE)
COMMAND = "IMBREX_NETLAB_COMMAND"
"""The variable that tells ranks by which command they were started, so that a benchmark can write it into its
results."""
SUBNET = "198.18.7"
"""A subnet of the range for benchmarks (RFC 2544); it exists inside the namespaces only."""
MEETING = {
    "MASTER_ADDR": f"{SUBNET}.1",
    "MASTER_PORT": "29511",
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_IFNAME": "eth0",
}


def run(args: argparse.Namespace) -> int:
    """Run the command on all ranks. Returns the largest exit code of ranks that ended by themselves, or 124
    after the time-out."""
    command = list(args.command)
    while command[:1] == ["--"]:
        command.pop(0)
    if args.gpus:
        check_gpus(args, command)
        return _start(args, command, time.monotonic() + args.timeout)
    args.inter, args.intra = args.inter or "1gbit", args.intra or "none"
    check(args, command)
    if os.environ.get(INSIDE) != "1":
        return _enter(args, command)
    build(args)
    return _start(args, command)


def check(args: argparse.Namespace, command: list[str]) -> None:
    """Raise ValueError if such a network cannot be built."""
    _check_ranks(args, command)
    for name in ("inter", "intra"):
        rate = getattr(args, name)
        if rate != "none" and not RATE.fullmatch(rate):
            raise ValueError(f"netlab: --{name} {rate!r} is not a rate; use e.g. 1gbit, 200mbit or none")
    check_memory(args.nodes * args.ranks_per_node)
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        raise ValueError(f"netlab: {' and '.join(missing)} not found; install iproute2 and util-linux")


def check_gpus(args: argparse.Namespace, command: list[str]) -> None:
    """Raise ValueError if there are fewer GPUs than ranks, or if rates are given, which `--gpus` cannot
    limit."""
    _check_ranks(args, command)
    if args.inter or args.intra:
        raise ValueError("netlab: --inter and --intra limit namespaces; with --gpus leave them out")
    needed, there = args.nodes * args.ranks_per_node, torch.cuda.device_count()
    if there < needed:
        raise ValueError(
            f"netlab: {needed} ranks want a GPU each, {there} are there; use fewer, or no --gpus"
        )
    check_memory(needed)


def _check_ranks(args: argparse.Namespace, command: list[str]) -> None:
    if not command:
        raise ValueError("netlab: no command; give one after --, as in: netlab run -- train.py --steps 10")
    if not 1 <= args.nodes <= 64 or args.ranks_per_node < 1:
        raise ValueError(
            f"netlab: {args.nodes} nodes of {args.ranks_per_node} ranks; use 1 to 64 nodes of at least 1"
        )
    if not 0 < args.timeout <= MAX_TIMEOUT_S:
        raise ValueError(
            f"netlab: --timeout {args.timeout:g} is no time; give seconds, at most {MAX_TIMEOUT_S:.0f}"
        )


def _enter(args: argparse.Namespace, command: list[str]) -> int:
    """Run this command again in namespaces of its own, as root or as anybody with user namespaces."""
    unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0:
        unshare += ["--user", "--map-root-user"]
    probe = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        why = probe.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise ValueError(
            f"netlab: namespaces cannot be made ({why[0]}); be root, or let users make them "
            "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)"
        )
    words = [sys.executable, "-m", "imbrex", "netlab", "run", *_options(args), "--", *command]
    process = subprocess.Popen([*unshare, *words], env=os.environ | {INSIDE: "1"}, preexec_fn=end_with_parent)
    previous = signal.signal(signal.SIGTERM, lambda *_: process.kill())
    try:
        return process.wait(args.timeout)
    except subprocess.TimeoutExpired:
        print(f"imbrex: netlab: not done after {args.timeout:g} s", file=sys.stderr)
        return 124
    finally:
        # The process is its namespace's first: with it everything inside ends, links included.
        process.kill()
        process.wait()
        signal.signal(signal.SIGTERM, previous)


def _options(args: argparse.Namespace) -> list[str]:
    names = ("nodes", "ranks_per_node", "inter", "intra", "timeout")
    return [word for n in names for word in (f"--{n.replace('_', '-')}", str(getattr(args, n)))]


def started_by() -> str:
    """The command by which this rank was started, up to the script."""
    return os.environ.get(COMMAND) or f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', 1)}"


def build(args: argparse.Namespace) -> None:
    """Make the namespaces n0, n1, ... and a switch, with each node's link limited in both directions."""
    _run("mount", "-t", "tmpfs", "none", "/run")
    Path("/run/netns").mkdir()
    for line in plan(args.nodes, args.inter, args.intra):
        _run(*line.split())


def plan(nodes: int, inter: str, intra: str) -> list[str]:
    """The commands that make the network.

    A bucket holds 256 KiB: with 64 KiB a link loses packets if both directions are full. Messages below half
    a megabyte go faster than the rate.
    """
    bucket = "burst 256kb limit 64mb"
    lines = ["ip link set lo up", "ip link add br0 type bridge", "ip link set br0 up"]
    for n in range(nodes):
        lines += [
            f"ip netns add n{n}",
            f"ip -n n{n} link set lo up",
            f"ip link add eth0 netns n{n} type veth peer name p{n}",
            f"ip -n n{n} addr add {SUBNET}.{n + 1}/24 dev eth0",
            f"ip -n n{n} link set eth0 up",
            f"ip link set p{n} master br0",
            f"ip link set p{n} up",
            f"ip netns exec n{n} sysctl -qw net.ipv4.tcp_slow_start_after_idle=0",
        ]
        if inter != "none":
            lines += [
                f"tc -n n{n} qdisc add dev eth0 root tbf rate {inter} {bucket}",
                f"tc qdisc add dev p{n} root tbf rate {inter} {bucket}",
            ]
        if intra != "none":
            lines.append(f"tc -n n{n} qdisc add dev lo root tbf rate {intra} burst 512kb limit 64mb")
    return lines


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"netlab: `{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}")


def _start(args: argparse.Namespace, command: list[str], until: float = float("inf")) -> int:
    """A process a rank, with the environment that torchrun would give it. When one fails, the others end.

    Not torchrun itself: after a failure its agents wait minutes for each other.
    """
    script = command[0].endswith(".py")
    if not (Path(command[0]).exists() if script else shutil.which(command[0])):
        raise ValueError(f"netlab: {command[0]} is not there; give a script or a command after --")
    if script:
        command = [sys.executable, *command]
    meeting = _gpu_meeting() if args.gpus else MEETING
    processes = []
    for rank in range(args.nodes * args.ranks_per_node):
        node, local = divmod(rank, args.ranks_per_node)
        environment = rank_environment(args, rank, local, node) | meeting
        if args.gpus:
            environment |= _gpus_of(args, node)
        words = command if args.gpus else ["ip", "netns", "exec", f"n{node}", *command]
        processes.append(subprocess.Popen(words, env=environment, preexec_fn=end_with_parent))
    code = _wait(processes, until)
    if code is None:
        print(f"imbrex: netlab: not done after {args.timeout:g} s", file=sys.stderr)
        return EXIT_LATE
    return code


def _wait(processes: Sequence[subprocess.Popen[bytes]], until: float) -> int | None:
    """The worst exit code of all processes that ended by themselves, those that are left when one has failed
    have `GRACE_S` for it; None where they had to be ended at `until`."""
    waiting, worst, last_word = list(processes), 0, float("inf")
    while waiting:
        if time.monotonic() > min(until, last_word):
            _end(waiting)
            return worst or None
        for process in list(waiting):
            try:
                code = process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            waiting.remove(process)
            worst = max(worst, code if code >= 0 else 128 - code)
            if code:
                last_word = min(last_word, time.monotonic() + GRACE_S)
    return worst


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def rank_environment(args: argparse.Namespace, rank: int, local: int, node: int) -> dict[str, str]:
    """The environment of a rank: the caller's, torchrun's variables, and how the network was made."""
    ours = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "GROUP_RANK": node,
        "WORLD_SIZE": args.nodes * args.ranks_per_node,
        "LOCAL_WORLD_SIZE": args.ranks_per_node,
    }
    inherited = {name: value for name, value in os.environ.items() if name != INSIDE}
    network = "--gpus " if args.gpus else f"--inter {args.inter} --intra {args.intra} "
    ours[COMMAND] = (
        f"imbrex netlab run {network}--nodes {args.nodes} --ranks-per-node {args.ranks_per_node} --"
    )
    # Every rank's socket would say that its host has no name.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {"OMP_NUM_THREADS": "1"} | quiet | inherited | {name: str(value) for name, value in ours.items()}


def _gpu_meeting() -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def _gpus_of(args: argparse.Namespace, node: int) -> dict[str, str]:
    """A node sees its own GPUs only, so that LOCAL_RANK numbers them."""
    first = node * args.ranks_per_node
    seen = ",".join(map(str, range(first, first + args.ranks_per_node)))
    return {"NCCL_HOSTID": f"netlab-{node}", "CUDA_VISIBLE_DEVICES": seen}
