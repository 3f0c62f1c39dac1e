"""Single files of a package that is installed without what it depends on.

`alone(package, files, names)` lets Python import the named files of the package as they were released. No
`__init__` runs. Every other module of the package is a stand-in, which has the names that the test gives it.
Other names can be imported and written in annotations and defaults, and raise once they are called, so that a
test says all that it replaces.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

Names = Mapping[str, Mapping[str, Any]]


class _NotReplaced(type):
    """A class whose instances nobody can make: trying to says what it was imported as."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        raise AssertionError(f"{cls.__module__}.{cls.__name__} is called, and the test does not replace it")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NotReplaced(f"{cls.__name__}.{name}", (), {"__module__": cls.__module__})


class _StandIn(ModuleType):
    """A module with the names that a test gives it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NotReplaced(name, (), {"__module__": self.__name__})


class _Finder(MetaPathFinder, Loader):
    def __init__(self, package: str, files: Sequence[str], names: Names) -> None:
        spec = importlib.util.find_spec(package) if files else None
        places = (spec and spec.submodule_search_locations) or [""]
        self.package, self.folder = package, Path(places[0])
        self.files, self.names = files, names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top != self.package:
            return None
        if rest in self.files:
            source = self.folder / (rest.replace(".", "/") + ".py")
            return importlib.util.spec_from_file_location(fullname, source)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self.names.get(module.__name__.partition(".")[2], {}))


@contextmanager
def alone(package: str, files: Sequence[str], names: Names) -> Iterator[None]:
    """Within it, `files` of the package are imported as released. files: modules, by their names in it; none
    where it is not installed. names: what stand-ins have, by module in the same way."""
    finder = _Finder(package, files, names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


def why_not_installed(package: str, version: str, requirements: str) -> str | None:
    """Says why the package's files cannot be run, or nothing."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        here = version_of(package)
    except PackageNotFoundError:
        return f"{package} {version} is not installed: see {requirements}"
    return None if here == version else f"{package} is {here}, the test is of {version}: see {requirements}"
