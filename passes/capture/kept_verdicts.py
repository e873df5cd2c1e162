"""What was found out about a trace that is kept on disk, noted beside it: which checks it, or a graph made of it, has passed.

A verdict is kept by a digest of all that it follows from; who keeps one says what that is. The file goes with its trace.
"""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)
_MOST = 16  # verdicts of one trace and kind: of models with other weights, or for other lengths


class KeptVerdicts:
    """The digests of checks that were passed, in the file of one ``kind`` beside a ``trace``."""

    def __init__(self, trace: Path, kind: str) -> None:
        self.file = trace.with_suffix(f".{kind}")

    def has(self, digest: str) -> bool:
        return digest in self._digests()

    def add(self, digest: str) -> None:
        """What fails (a full disk) is logged: the check is made again."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text("\n".join([*self._digests(), digest][-_MOST:]))
        except OSError as error:
            logger.info("the verdict on a kept trace is not noted: %s", error)

    def _digests(self) -> list[str]:
        try:
            return self.file.read_text().split()
        except (OSError, UnicodeDecodeError):
            return []
