"""The structs of kernels as the host reads them from their declarations."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from imbrex.kernels import structs
from imbrex.kernels.exchange import layout as lay
from tests.emulated import kernel

DECLARED = """
#include "inner.cuh"
namespace some {
struct Outer {
    const u8 *x, *y;  // two of them; one line
    Inner inner;
    float scale, ends[2][kMany];
    i64 at;
};
}
"""
INNER = "constexpr int kMany = 3;\nnamespace some {\nstruct Inner {\n    u8* row;\n    int rows;\n};\n}\n"


@pytest.fixture
def outer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[structs.Struct]]:
    (tmp_path / "outer.cuh").write_text(DECLARED)
    (tmp_path / "inner.cuh").write_text(INNER)
    monkeypatch.setattr(structs, "SOURCES", tmp_path)
    structs.struct.cache_clear()
    yield structs.struct("outer.cuh", "Outer")
    structs.struct.cache_clear()


def test_fields_lie_as_declared(outer: type[structs.Struct]) -> None:
    assert outer.qualified == "some::Outer"
    places = {name: (getattr(outer, name).offset, getattr(outer, name).size) for name in outer.names}
    assert places == {
        "x": (0, 8),
        "y": (8, 8),
        "inner": (16, 16),
        "scale": (32, 4),
        "ends": (36, 24),
        "at": (64, 8),
    }
    assert ctypes.sizeof(outer) == 72


def test_every_field_is_given_by_its_name(outer: type[structs.Struct]) -> None:
    inner, x = structs.struct("inner.cuh", "Inner"), torch.zeros(3)
    fields = {"x": x, "y": None, "scale": 0.5, "ends": ((ctypes.c_float * 3) * 2)(), "at": 7}
    made = outer(**fields, inner=inner(row=None, rows=3))
    assert (made.x, made.y, made.inner.rows, made.scale, made.at) == (x.data_ptr(), None, 3, 0.5, 7)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'inner'"):
        outer(**fields)
    with pytest.raises(TypeError, match="unexpected keyword argument 'row_bytes'"):
        inner(row=None, rows=3, row_bytes=1)


@pytest.mark.skipif(not kernel.available(), reason="needs g++")
def test_a_field_in_the_wrong_place_does_not_compile(tmp_path: Path) -> None:
    """What the emulated build asserts, with two fields of `Pull` in each other's place."""
    text = (structs.SOURCES / lay.Pull.source).read_text()
    wrong = text.replace("    i64 inbox_at;", "    i64 inbox;").replace(
        "    i64 x_stride;", "    i64 inbox_at;"
    )
    sources = {lay.Pull.source: wrong.replace("    i64 inbox;", "    i64 x_stride;")}
    declaration = sources[lay.Pull.source].split("struct PullView")[0].split("struct Pull {")[1]
    types = "using u8 = unsigned char;\nusing i64 = long long;\n"
    (tmp_path / "pull.cpp").write_text(
        f"{types}namespace mover {{ struct Pull {{{declaration}}}\n{kernel.struct_checks(sources)}"
    )
    ran = subprocess.run(["g++", "-fsyntax-only", "pull.cpp"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode != 0
    assert "mover::Pull::inbox_at" in ran.stderr
