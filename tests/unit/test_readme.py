"""The README shows what is: its commands run, its code runs, its map is the house's."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
from docs.borrowed import BORROWED

from imbrex.cli import main
from imbrex.codec import CODECS
from imbrex.transport import TRANSPORTS
from tests import house
from tests.as_a_user import environment
from tests.ranks.forked import Forked

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ENV = environment(OMP_NUM_THREADS="1", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
SHORTER = {"demo": ["--steps", "2", "--ranks", "2"], "bench": ["-n", "1", "--warmup", "0"]}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands(first: str) -> list[list[str]]:
    lines = "".join(blocks("bash")).splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words[0] == first]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(words, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, f"{shlex.join(words)}\n{ran.stdout}\n{ran.stderr}"
    return ran


def fork(call: Callable[..., Any], *words: str, folder: Path, name: str = "") -> Forked:
    """A command whose launcher and ranks need not import torch anew; those of `run` do, as a user's."""
    return Forked(call, list(words), folder=folder, name=name, traced=False, PATH=ENV["PATH"])


def torchrun(*words: str, folder: Path, name: str = "") -> Forked:
    return fork(torch.distributed.run.main, *words, folder=folder, name=name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_first_screen_says_what_it_is() -> None:
    """One claim with a number, one picture, how to install it, eight lines of use, what is supported."""
    screen = README.partition("## ")[0]
    claim = re.search(r"^\*\*imbrex .* \d+(\.\d+)? times .*\*\*$", screen, re.MULTILINE)
    places = [claim.start() if claim else -1]
    places += [screen.find(part) for part in ("![", "pip install", "```python", "| hardware |")]
    assert -1 not in places
    assert places == sorted(places)
    assert screen.count("![") == 1
    assert screen.count("\n") < 70


def test_every_make_target_it_names_is_there() -> None:
    named = {words[1] for words in commands("make")}
    assert named == {"demo", "test"}
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    named |= set(re.findall(r"`make ([a-z-]+)", README + contributing))
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert named <= targets, named - targets
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_the_demo_prints_what_is_shown(tmp_path: Path) -> None:
    (words,) = [words for words in commands("imbrex") if words[1] == "demo"]
    texts = [str(ROOT / word) if word.endswith(".md") else word for word in words]
    ran = run([*texts, *SHORTER["demo"], "--out", str(tmp_path / "mine")])
    (shown,) = (text for text in blocks("text") if text.startswith("step"))
    progress, *closing = [line for line in shown.splitlines() if not line.startswith("step 200")]
    assert form(progress) in map(form, ran.stderr.splitlines())
    assert [form(line) for line in closing] == list(map(form, ran.stdout.splitlines()))
    for name in ("report.html", "metrics.jsonl", "summary.json", "trace.json", "checkpoint"):
        assert (tmp_path / "mine" / name).exists()


def form(line: str) -> str:
    """The line without its numbers and paths."""
    return re.sub(r"[\d.,]+", "0", re.sub(r"\S*/(report\.html|trace\.json)", r"\1", line))


def test_doctor_needs_no_words() -> None:
    """It runs whole in test_doctor.py."""
    assert [words for words in commands("imbrex") if words[1] == "doctor"] == [["imbrex", "doctor"]]


@pytest.mark.parametrize("words", [w for w in commands("imbrex") if w[1] == "bench"], ids=shlex.join)
def test_the_commands_shown_run(words: list[str], tmp_path: Path) -> None:
    ran = fork(main, *words[1:], *SHORTER.get(words[1], []), folder=tmp_path)
    assert ran.wait() == 0, ran.stderr
    assert "alltoall" in ran.stdout


def test_the_eight_lines_run_and_are_eight(tmp_path: Path) -> None:
    (code,) = blocks("python")
    statements = [line for line in code.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(statements) == 8
    (tmp_path / "layer.py").write_text(code)
    assert "torchrun --nproc-per-node 2 layer.py" in README
    layer = str(tmp_path / "layer.py")
    ran = torchrun("--standalone", "--nproc-per-node", "2", layer, folder=tmp_path)
    assert ran.wait() == 0, ran.stderr
    assert ran.stdout.count("expert_parallel=2") == 2
    assert ran.stdout.count("asked for") + ran.stdout.count("a token wants") >= 2


@pytest.mark.parametrize(
    "page",
    [
        "layer",
        "huggingface",
        "codecs",
        "observation",
        "placement",
        "schedules",
        "fused",
        "transports",
        "extending",
        "plan",
    ],
)
def test_the_code_of_the_documentation_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one rank of one, where it makes a process group."""
    for name, value in (
        ("RANK", 0),
        ("WORLD_SIZE", 1),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", 0),
    ):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("imbrex.codec.CODECS", dict(CODECS))  # a page registers one more
    found = re.findall(
        r"^```python\n(.*?)^```", (ROOT / f"docs/{page}.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert found
    for code in found:
        exec(compile(code, f"docs/{page}.md", "exec"), {})


def test_several_machines_run(tmp_path: Path) -> None:
    """Its torchrun command with two agents here in the place of two machines, one rank each."""
    (words,) = commands("torchrun")
    here = {"8": "1", "first-machine:29500": f"localhost:{free_port()}", "cuda": "cpu"}
    words = [here.get(word, word) for word in words[1:-1]]
    agent = "--local-addr", "localhost", *words, str(tmp_path / "two"), "--steps", "2"
    machines = [torchrun(*agent, folder=tmp_path, name=f"-{machine}") for machine in range(2)]
    codes = [machine.wait() for machine in machines]
    printed = "".join(machine.stdout + machine.stderr for machine in machines)
    assert codes == [0, 0], printed
    assert printed.count("held-out loss") == 1
    assert (tmp_path / "two" / "report.html").exists()


def test_the_map_is_the_house() -> None:
    table = README.partition("<!-- the rooms")[2].partition("<!-- end of the rooms")[0]
    shown = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    sources = [p.relative_to(ROOT) for p in (ROOT / "src").rglob("*.py")]  # ROOT may be called imbrex, too
    modules = [house.module_of(p.as_posix()) for p in sources]
    rooms = {house.room(module) for module in modules} - {"", "__main__"}
    assert len(shown) == len(set(shown))
    assert set(shown) == rooms, "add or remove a line of README's map"


def test_every_page_is_listed() -> None:
    listed = re.findall(r"\(docs/([\w-]+\.md)\)", README.partition("## Pages\n")[2].partition("\n## ")[0])
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(listed) == sorted(pages - BORROWED.keys()), "add or remove a link of README's pages"


def test_every_transport_and_codec_is_named() -> None:
    table = (ROOT / "docs/transports.md").read_text().partition("| name | how |")[2].partition("\n\n")[0]
    first_cells = re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
    shown = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(shown) == sorted(TRANSPORTS)
    said = README.partition("by a [codec]")[2].partition(" and ZFP at")[0]
    families = {name.partition("-")[0] for name in CODECS if not name.startswith("zfp")}
    assert {"identity", *re.findall(r"`(\w+)`", said)} == families
    assert f"ZFP at {sum(name.startswith('zfp') for name in CODECS)} rates" in README


def test_links_lead_somewhere() -> None:
    for file in ("README.md", "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / file).read_text()):
            assert (ROOT / link).exists(), f"{file} links to {link}"


def test_every_variable_that_is_read_is_documented() -> None:
    read = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"environ(?:\.get\(|\[)\"(IMBREX_[A-Z_]+)\"", path.read_text())
    }
    internal = {"IMBREX_NETLAB_INSIDE"}
    text = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert read >= {"IMBREX_TIMEOUT_S", "IMBREX_DEBUG", "IMBREX_CACHE_DIR"}
    assert {name for name in read - internal if f"`{name}" not in text} == set()
