"""`imbrex bench exchange` without the GPUs that it needs."""

from __future__ import annotations

import pytest
import torch

from imbrex.cli import main
from imbrex.cli.bench_exchange import jobs_of


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where nothing is")
def test_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "exchange"]) == 2
    assert capsys.readouterr().err == (
        "imbrex bench exchange: imbrex kernels need an NVIDIA GPU and torch sees none\n"
    )


def test_every_case_divides_its_experts() -> None:
    for world in (1, 2, 4, 8):
        jobs = jobs_of(world, quick=False)
        assert all(job.E % world == 0 and job.K <= job.E for job in jobs)
        assert {job.routing for job in jobs} == {"uniform", "zipf"}
