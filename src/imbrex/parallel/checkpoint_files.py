"""Checkpoints as folders: which of them are ours and whole, how they appear and how they go.

    DIRECTORY/step_00000200/             files of torch.distributed.checkpoint, and COMPLETE
    DIRECTORY/.step_00000250.partial/    being written, or cut off: never read
    DIRECTORY/.step_00000200.replaced/   the earlier step 200 while a new one takes its place
    DIRECTORY/.step_00000100.removing/   no longer there; what a removal that was cut off left

COMPLETE is JSON: format, step, the caller's `extra`, size and SHA-256 of every other file, and its own. A
folder of another name, or with a file that no checkpoint has, is somebody else's: it is never removed.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

FORMAT = 2
MARK = "COMPLETE"
_STEP = r"step_(\d{8}|[1-9]\d{8,})"
_FOLDER = re.compile(_STEP)
_HIDDEN = re.compile(rf"\.({_STEP})\.(partial|replaced|removing)")
_FILE = re.compile(rf"__\d+_\d+\.distcp|\.metadata(\.tmp)?|{MARK}")

Digests = dict[str, tuple[int, str]]
"""Size in bytes and SHA-256, in hex, of files by name."""


class CheckpointDamaged(OSError):
    """A checkpoint is not what was written: a file is missing, cut off or changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamEvent:
    """The contents of COMPLETE."""

    step: int
    extra: dict[str, Any]
    files: Digests


def folder_of(directory: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return directory / f"step_{step:08d}"


def marked(directory: Path) -> list[Path]:
    """The folders that look like complete checkpoints, by step. One that was being replaced by another of the
    same step counts until that other is there."""
    if not directory.is_dir():
        return []
    steps: dict[int, Path] = {}
    for path in sorted(directory.iterdir(), reverse=True):
        name, hidden = _FOLDER.fullmatch(path.name), _HIDDEN.fullmatch(path.name)
        if name is not None and (path / MARK).is_file():
            steps[int(name[1])] = path
        elif hidden is not None and hidden[3] == "replaced" and (path / MARK).is_file():
            steps.setdefault(int(hidden[2]), path)
    return [steps[step] for step in sorted(steps)]


def newest(directory: Path, *, besides: Path | None = None) -> Path | None:
    """The newest whose mark can be read; the other files are not looked at."""
    for path in reversed(marked(directory)):
        try:
            read_mark(path)
        except (OSError, ValueError):
            continue
        if path != besides:
            return path
    return None


def read_mark(path: Path) -> StreamEvent:
    """Raises ValueError where `path` is no complete checkpoint or one of another format, and
    CheckpointDamaged where its mark was changed."""
    try:
        text = (path / MARK).read_text()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path} is no complete checkpoint; pass a step_... folder that holds a {MARK} file, on a disk "
            "that all ranks see"
        ) from None
    except UnicodeDecodeError:
        text = ""
    try:
        mark = json.loads(text)
        number = mark["format"]
        if number == FORMAT:
            whole = mark.pop("sha256") == _sha256(mark)
            files = {str(name): (int(size), str(digest)) for name, (size, digest) in mark["files"].items()}
            if whole:
                return StreamEvent(step=int(mark["step"]), extra=mark["extra"], files=files)
            raise ValueError("changed")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointDamaged(f"checkpoint {path} is damaged: its {MARK} was changed") from None
    raise ValueError(
        f"{path} has checkpoint format {number}, this version reads {FORMAT}; load it with the version that "
        "wrote it"
    )


def _sha256(mark: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(mark, sort_keys=True).encode()).hexdigest()


def digest(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256, in hex, of a file. Raises OSError where it is none."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file", str(path))  # a pipe would be waited for, without an end
    with path.open("rb") as file:
        hexadecimal = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), hexadecimal


def check_whole(path: Path, files: Digests, names: Iterable[str]) -> None:
    """Raise CheckpointDamaged where one of `names` is not as it was written."""
    for name in names:
        try:
            size, hexadecimal = digest(path / name)
        except FileNotFoundError:
            raise CheckpointDamaged(f"checkpoint {path} is damaged: {name} is missing") from None
        except OSError as error:
            raise CheckpointDamaged(
                f"checkpoint {path} is damaged: {name} cannot be read ({error.strerror})"
            ) from None
        if (size, hexadecimal) != files[name]:
            how = "its checksum is another" if size == files[name][0] else f"{size} bytes of {files[name][0]}"
            raise CheckpointDamaged(f"checkpoint {path} is damaged: {name} was changed ({how})")


def make_room(directory: Path, step: int) -> Path:
    """The empty folder to write the checkpoint of `step` to. What was cut off before is swept away.

    Raises ValueError where the checkpoint's place is taken by what is no checkpoint.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in list(directory.iterdir()):
        hidden = _HIDDEN.fullmatch(path.name)
        if hidden is None or strangers(path):
            continue
        if hidden[3] == "replaced" and not (directory / hidden[1]).exists():
            path.rename(directory / hidden[1])
        else:
            shutil.rmtree(path)
    final = folder_of(directory, step)
    if os.path.lexists(final) and (strange := strangers(final)):
        raise ValueError(
            f"{final} holds {strange[0]}, which no checkpoint has: move it elsewhere, or save to another "
            "directory"
        )
    partial = final.with_name(f".{final.name}.partial")
    partial.mkdir()
    return partial


def strangers(path: Path) -> list[str]:
    """The sign that the folder `path` is somebody else's: what no checkpoint has, or that it is no folder."""
    if path.is_symlink() or not path.is_dir():
        return [path.name]
    return sorted(entry.name for entry in path.iterdir() if not _FILE.fullmatch(entry.name))


def publish(partial: Path, final: Path, mark: StreamEvent) -> None:
    """Bring everything to the disk, mark it and give it its name, in this order."""
    content = {"format": FORMAT, "step": mark.step, "extra": mark.extra, "files": mark.files}
    # The digest is of what will be read: JSON has no tuples.
    content = json.loads(json.dumps(content))
    with (partial / MARK).open("w") as file:
        json.dump(content | {"sha256": _sha256(content)}, file)
        file.flush()
        os.fsync(file.fileno())
    flush(partial)
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def flush(directory: Path) -> None:
    """Bring a directory's entries to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prune(directory: Path, keep: int, step: int) -> None:
    """Remove the checkpoints up to that of `step`, which is there, but the `keep` newest of them.

    Later ones, of a future that was given up for an earlier checkpoint, are neither counted nor removed.
    """
    last = folder_of(directory, step)
    paths = marked(directory)
    for path in paths[: paths.index(last) + 1][:-keep]:
        _remove(path)


def clear(directory: str | os.PathLike[str]) -> None:
    """Remove every checkpoint in `directory`, complete or not, and `directory` if nothing else is in it."""
    directory = Path(directory)
    if not directory.is_dir():
        return
    for path in list(directory.iterdir()):
        if _HIDDEN.fullmatch(path.name) or _FOLDER.fullmatch(path.name):
            _remove(path)
    if not directory.is_symlink() and not any(directory.iterdir()):
        directory.rmdir()


def _remove(path: Path) -> None:
    """Remove a checkpoint. It loses its name first: half removed, it must not look complete."""
    if strangers(path):
        return
    gone = path.with_name(f".{path.name.strip('.').split('.')[0]}.removing")
    if path != gone:
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
    shutil.rmtree(gone)


class Reader(FileSystemReader):
    """torch's, which reads its metadata without running what is in it: a pickle may name any function, this
    takes the few classes that metadata consists of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        assert kwargs.get("rank") is None
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except (
                pickle.UnpicklingError,
                EOFError,
                AttributeError,
                IndexError,
                TypeError,
                ValueError,
            ) as error:
                raise CheckpointDamaged(
                    f"checkpoint {path.parent}: {path.name} is refused: {error}"
                ) from None
        if not isinstance(metadata, Metadata):
            raise CheckpointDamaged(f"checkpoint {path.parent}: {path.name} holds no metadata of torch")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


_OF_TORCH = "torch.distributed.checkpoint"
_TAKEN = {
    f"{_OF_TORCH}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_OF_TORCH}.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
}


def _member(kind: Any, name: str) -> Enum:
    """A member of an enumeration, which Python up to 3.11.3 writes as a call of `getattr`."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"it asks {kind!r} for {name!r}, which is not part of a checkpoint")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) == ("builtins", "getattr"):
            return _member
        if name in _TAKEN.get(module, ()):
            # Python 3.13 keeps its paths in a module that others do not have.
            return getattr(importlib.import_module(module.removesuffix("._local")), name)
        value = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of a checkpoint")
