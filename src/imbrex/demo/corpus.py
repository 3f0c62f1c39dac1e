"""Text as bytes, split by file into training and held-out, and batches that do not depend on rank counts."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_HELD_OUT = 10
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "idlelib"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A text in two parts. train, held_out: uint8, the bytes of a part's files, one after the other."""

    name: str
    num_files: int
    train: Tensor
    held_out: Tensor

    def batch(self, step: int, *, seed: int, batch: int, length: int) -> Tensor:
        """The global training batch of `step`: int64 [batch, length + 1], the same on every rank."""
        starts = np.random.default_rng([seed, step]).integers(len(self.train) - length, size=batch)
        return _windows(self.train, torch.from_numpy(starts), length)

    def held_out_batches(self, num: int, *, batch: int, length: int) -> Tensor:
        """int64 [num, batch, length + 1]: windows spread evenly over the held-out text."""
        starts = torch.linspace(0, len(self.held_out) - length - 1, num * batch).long()
        return _windows(self.held_out, starts, length).view(num, batch, length + 1)

    def reference_losses(self) -> dict[str, float]:
        """Nats a byte on the held-out text when the training text's counts predict it, plus one each:
        of single bytes, and of a byte after the byte before."""
        train, held_out = self.train.numpy(), self.held_out.numpy()
        singles = np.bincount(train, minlength=256).astype(np.float64) + 1
        unigram = -np.log(singles / singles.sum())[held_out].mean()
        pairs = train[:-1].astype(np.int64) * 256 + train[1:]
        two = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + 1.0
        bigram = -np.log(two / two.sum(1, keepdims=True))[held_out[:-1], held_out[1:]].mean()
        return {"unigram": float(unigram), "bigram": float(bigram)}


def _windows(text: Tensor, starts_N: Tensor, length: int) -> Tensor:
    return text[starts_N[:, None] + torch.arange(length + 1)].long()


def load_corpus(files: Sequence[str | os.PathLike[str]] = (), *, length: int) -> Corpus:
    """The user's `files`, or the source of the standard library that this Python carries.

    A tenth of the files, chosen by a checksum of their names, is held out; of a single file, its last tenth.

    Raises `ValueError` for a file that cannot be read or is empty, and where either part is not longer than
    `length` bytes.
    """
    if files:
        texts = [(str(path), _read(Path(path))) for path in files]
        name = str(files[0]) if len(files) == 1 else f"{len(files)} files of --data"
    else:
        texts = _standard_library()
        name = "the standard library's source"
    if len(texts) == 1:
        text = texts[0][1]
        cut = len(text) - len(text) // _HELD_OUT
        train, held_out = [text[:cut]], [text[cut:]]
    else:
        texts = sorted(texts, key=lambda item: (zlib.crc32(item[0].encode()), item[0]))
        cut = -(-len(texts) // _HELD_OUT)
        held_out, train = [text for _, text in texts[:cut]], [text for _, text in texts[cut:]]
    corpus = Corpus(name=name, num_files=len(texts), train=_join(train), held_out=_join(held_out))
    for part, text in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(text) <= length:
            raise ValueError(
                f"the {part} part of {name} has {len(text)} bytes, but a sequence takes {length + 1}: "
                "give more or larger files"
            )
    return corpus


def _read(path: Path) -> bytes:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"the data file {path} is no file, and may have no end: give files of text")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"cannot read the data file {path}: {error.strerror}: give files that can be read"
        ) from None
    if not text:
        raise ValueError(f"the data file {path} is empty: leave it out, or give one that holds text")
    return text


def _standard_library() -> list[tuple[str, bytes]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(set(inner) - _LEFT_OUT)
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            if text := path.read_bytes():
                texts.append((path.relative_to(root).as_posix(), text))
    if len(texts) < 2:
        raise ValueError(
            f"this Python carries no source of its standard library in {root}: give text with --data FILE"
        )
    return texts


def _join(texts: list[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(texts), dtype=np.uint8).copy())
