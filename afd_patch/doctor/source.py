"""A vLLM as files: the installed one, an unpacked source tree, or a wheel. Nothing of it is ever imported."""

from __future__ import annotations

import ast
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from afd_patch.errors import ConfigError

Read = Callable[[str], bytes | None]
_PACKAGE = "vllm"
#: A file that every vLLM has right in its package.
_LANDMARK = "forward_context.py"
_VERSION = re.compile(rb"^__version__\s*(?::[^=]+)?=\s*(?:version\s*=\s*)?['\"]([^'\"]+)['\"]", re.MULTILINE)


class SourceTree:
    """``read`` takes paths relative to the folder that has the package, ``names`` lists all files of the package."""

    def __init__(
        self, where: str, read: Read, names: Callable[[], Iterator[str]], top: Callable[[], list[str]]
    ) -> None:
        self.where = where
        self._read = read
        self._names = names
        self._top = top
        self._parsed: dict[str, ast.Module | None] = {}

    @classmethod
    def open(cls, path: Path) -> SourceTree:
        """The vLLM at ``path``: a folder with the package, the package itself, or a wheel.

        Raises ``ConfigError`` when there is none.
        """
        if path.is_file() and zipfile.is_zipfile(path):
            return cls._of_zip(path)
        for folder in (path, path / "src"):
            if (folder / _PACKAGE / _LANDMARK).is_file():
                return cls._of_folder(folder)
        if (path / _LANDMARK).is_file() and (path / "model_executor").is_dir():
            return cls._of_package(path)
        raise ConfigError(
            f"{path} is no vLLM: there is no {_PACKAGE}/{_LANDMARK} in it; give an unpacked source tree or a wheel"
        )

    @classmethod
    def _of_folder(cls, folder: Path) -> SourceTree:
        return cls(
            str(folder / _PACKAGE),
            lambda name: _bytes(folder / name),
            lambda: (p.relative_to(folder).as_posix() for p in (folder / _PACKAGE).rglob("*.py")),
            lambda: [p.name for p in folder.iterdir()],
        )

    @classmethod
    def _of_package(cls, package: Path) -> SourceTree:
        def names() -> Iterator[str]:
            return (f"{_PACKAGE}/{p.relative_to(package).as_posix()}" for p in package.rglob("*.py"))

        def read(name: str) -> bytes | None:
            inside = name.startswith(f"{_PACKAGE}/")
            return _bytes(package / name.removeprefix(f"{_PACKAGE}/") if inside else package.parent / name)

        return cls(str(package), read, names, lambda: [p.name for p in package.parent.iterdir()])

    @classmethod
    def _of_zip(cls, path: Path) -> SourceTree:
        with _damage(path):
            archive = zipfile.ZipFile(path)
        members = archive.namelist()
        present = set(members)

        def read(name: str) -> bytes | None:
            with _damage(path):
                return archive.read(name) if name in present else None

        if f"{_PACKAGE}/{_LANDMARK}" not in present:
            raise ConfigError(f"{path} is no wheel of vLLM: there is no {_PACKAGE}/{_LANDMARK} in it")
        return cls(
            str(path),
            read,
            lambda: (n for n in members if n.startswith(f"{_PACKAGE}/") and n.endswith(".py")),
            lambda: sorted({n.partition("/")[0] for n in members}),
        )

    # -- modules -------------------------------------------------------------------------------------------------

    def file_of(self, module: str) -> str | None:
        """The file of ``module``, relative to the tree, or ``None``."""
        path = module.replace(".", "/")
        return next((name for name in (f"{path}.py", f"{path}/__init__.py") if self._read(name) is not None), None)

    def is_package(self, module: str) -> bool:
        return (self.file_of(module) or "").endswith("/__init__.py")

    def parse(self, module: str) -> ast.Module | None:
        """The syntax tree of ``module``, or ``None`` when there is no such module."""
        if module not in self._parsed:
            name = self.file_of(module)
            self._parsed[module] = None if name is None else self._parse_file(name)
        return self._parsed[module]

    def _parse_file(self, name: str) -> ast.Module:
        try:
            return ast.parse(self._read(name) or b"", name)
        except (SyntaxError, ValueError) as error:
            raise ConfigError(
                f"{name} in {self.where} cannot be read by Python {sys.version_info.major}.{sys.version_info.minor} "
                f"({error}); use the Python that this vLLM is for"
            ) from None

    def defining(self, name: str) -> list[str]:
        """Modules that define a class or function ``name`` at their top level. Reads the whole tree."""
        pattern = re.compile(rb"^(?:class|def|async def) " + re.escape(name.encode()) + rb"\b", re.MULTILINE)
        return sorted(
            file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for file in self._names()
            if pattern.search(self._read(file) or b"")
        )

    # -- what the tree says about itself -------------------------------------------------------------------------

    def version(self) -> str | None:
        match = _VERSION.search(self._read(f"{_PACKAGE}/_version.py") or b"")
        return match[1].decode() if match else self._metadata("Version")

    def distribution(self) -> str | None:
        """The name of the distribution that the tree belongs to, if it says so."""
        return self._metadata("Name")

    def _metadata(self, key: str) -> str | None:
        for name in self._top():
            if not name.endswith(".dist-info") or not name.startswith(_PACKAGE):
                continue
            # vllm-ascend and others start with the same letters and are not vLLM.
            if re.search(rb"^vllm/__init__\.py,", self._read(f"{name}/RECORD") or b"", re.MULTILINE):
                return _header(self._read(f"{name}/METADATA"), key)
        return _header(self._read("PKG-INFO"), key)


def installed() -> SourceTree | None:
    """The vLLM that this Python would import, or ``None``.

    ``importlib.util.find_spec`` would also ask our own finder, which ends the process when a setting is wrong.
    """
    for finder in sys.meta_path:
        if type(finder).__module__.startswith("afd_patch."):
            continue
        spec = finder.find_spec(_PACKAGE, None, None) if hasattr(finder, "find_spec") else None
        if spec is not None and spec.submodule_search_locations:
            for folder in spec.submodule_search_locations:
                if (Path(folder) / _LANDMARK).is_file():
                    return SourceTree.open(Path(folder).parent if Path(folder).name == _PACKAGE else Path(folder))
    return None


@contextmanager
def _damage(wheel: Path) -> Iterator[None]:
    """Raises ``ConfigError`` where ``wheel`` cannot be unpacked."""
    try:
        yield
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{wheel} is a damaged wheel ({error}); fetch it again") from None


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _header(metadata: bytes | None, key: str) -> str | None:
    match = re.search(rf"^{key}: *(\S+)".encode(), metadata or b"", re.MULTILINE)
    return match[1].decode() if match else None
