"""A description of this machine for `doctor` and result files: versions, devices, the links between them."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist

from imbrex.overlap.tunings import processor

PACKAGES = ("imbrex", "triton", "numpy", "cuda-core", "nvidia-cuda-nvrtc")
NVIDIA_SMI_S = 20.0


def versions() -> dict[str, str]:
    """Version by name; what is not installed is left out."""
    # Torch's own: the package's may lack which CUDA it was built for.
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    versions.setdefault("imbrex", "source tree")
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if driver := _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader"):
        versions["driver"] = driver.splitlines()[0].strip()
    return versions


def devices() -> list[dict[str, Any]]:
    """The processor first, then every GPU that torch sees. Memory in GiB."""
    links: list[dict[str, Any]] = [
        {"kind": "cpu", "name": processor(), "cores": cores(), "memory_gib": round(_memory_gib(), 1)}
    ]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        links.append(
            {
                "kind": "cuda",
                "name": gpu.name,
                "memory_gib": round(gpu.total_memory / 2**30, 1),
                "sms": gpu.multi_processor_count,
                "capability": f"{gpu.major}.{gpu.minor}",
            }
        )
    return links


def links() -> list[dict[str, Any]]:
    """How every pair of GPUs is joined (`via`: nvidia-smi's word, NV18 or PIX), and the network devices."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    via = _topology()
    networks: list[dict[str, Any]] = [
        {
            "between": [a, b],
            "via": via.get((a, b), "unknown"),
            "peer_access": torch.cuda.can_device_access_peer(a, b),
        }
        for a in range(count)
        for b in range(a + 1, count)
    ]
    rdma = Path("/sys/class/infiniband")
    if rdma.is_dir():
        networks += [{"network": device.name, "via": "RDMA"} for device in sorted(rdma.iterdir())]
    return networks


def hardware() -> dict[str, Any]:
    """The machine as a result file names it: its GPUs, or its processor where it has none."""
    processor, *gpus = devices()
    about = {"cpu": processor["name"], "cores": processor["cores"]}
    if not gpus:
        return about
    return {"gpu": gpus[0]["name"], "count": len(gpus), "memory_gib": gpus[0]["memory_gib"], **about}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_gib() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return 0.0


def _topology() -> dict[tuple[int, int], str]:
    """The GPU rows of `nvidia-smi topo -m`: word i of row GPU<a> is how it reaches GPU<i>."""
    matrix = {}
    for line in _nvidia_smi("topo", "-m").splitlines():
        words = line.split()
        if len(words) > 1 and words[0].startswith("GPU") and words[0][3:].isdigit() and words[1] != "GPU1":
            matrix |= {(int(words[0][3:]), b): word for b, word in enumerate(words[1:])}
    return matrix


@functools.cache
def _nvidia_smi(*arguments: str) -> str:
    """Standard output of nvidia-smi; empty if the program is missing, fails or hangs."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        ran = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout if ran.returncode == 0 else ""


def foreign_bytes() -> int:
    """Bytes of the current GPU in use that torch's allocator did not take: heaps, communicators, the context;
    0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
