"""Measurements on disk, as JSON: a file that ships with quire, and the user's own, which takes precedence.

The user's files are in ``cache_folder()``. A file is ``{"format": FORMAT, <section>: ...}``; one with another format, or with
content that its store does not accept, is ignored with one warning.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

logger = logging.getLogger(__name__)
FORMAT = 1
Content = TypeVar("Content")


def cache_folder() -> Path:
    """Where measurements made on this machine are kept: $QUIRE_CACHE_DIR, else quire's folder in the XDG cache."""
    if folder := os.environ.get("QUIRE_CACHE_DIR"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"
    except RuntimeError:  # no home, as of a user whom a container does not know
        return _own_folder()


@functools.cache
def _own_folder() -> Path:
    """One that only this user can write, as its files are trusted: of this process, and gone with it."""
    folder = tempfile.mkdtemp(prefix="quire-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name, without the index of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Store(Generic[Content]):
    """``shipped``: the file that ships with quire; the user's has the same name. ``section``: the key of the measurements in
    it. ``parse``: JSON -> content; raises AttributeError, KeyError, TypeError or ValueError for what ``save`` did not write.
    ``advice``: how a user has an unreadable file rewritten, for the warning."""

    shipped: Path
    section: str
    parse: Callable[[Any], Content]
    advice: str

    @property
    def user_file(self) -> Path:
        return cache_folder() / self.shipped.name

    @property
    def files(self) -> tuple[Path, Path]:
        """In order of precedence."""
        return self.user_file, self.shipped

    def load(self, path: Path) -> Content | None:
        """The content of a file; None if there is no such file, or, with a warning, if it cannot be read."""
        try:
            state = path.stat()
        except OSError:
            return None
        return _load(self, path, state.st_mtime_ns, state.st_size)

    def save(self, content: Any, path: Path | None = None) -> Path:
        """Replace a file (None: the user's) by ``content``, as JSON, atomically. Raises OSError if that is not possible."""
        path = path or self.user_file
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        text = json.dumps({"format": FORMAT, self.section: content}, indent=1)
        # A list of numbers on one line.
        text = re.sub(r"\[\n\s*([^][{}]*?)\n\s*\]", lambda row: f"[{' '.join(row[1].split())}]", text)
        part.write_text(text + "\n")
        part.replace(path)
        _load.cache_clear()
        return path


@functools.lru_cache(maxsize=16)
def _load(store: Store[Any], path: Path, mtime: int, size: int) -> Any:
    """Read once per version of the file, so that its warning is logged once."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, and this version of quire reads {FORMAT}")
        return store.parse(content[store.section])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("the measurements in %s are ignored (%s: %s); %s", path, type(error).__name__, error, store.advice)
        return None
