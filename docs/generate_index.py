"""Write docs/index.md from docs/index.toml, after checking that every target exists.

    python docs/generate_index.py            # writes the page
    python docs/generate_index.py --check    # exits with 1 if the page is not up to date
"""

from __future__ import annotations

import functools
import importlib
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HEAD = """# Where names from vLLM and SGLang are

Generated from [index.toml](index.toml) by `python docs/generate_index.py`. The names are those of vLLM's attention
utilities and of SGLang's model executor. What has a place in quire has the same meaning there, apart from the remark; where
there is none, the remark says why, and what to use instead.
"""


def entries() -> dict[str, dict[str, list[str]]]:
    """{section: {name: [target, note]}}"""
    return tomllib.loads((HERE / "index.toml").read_text())


def resolve(target: str) -> Any:
    """The object that ``module:attribute.attribute`` names. Raises ImportError or AttributeError if there is none."""
    module, _, path = target.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def page() -> str:
    lines = [HEAD]
    for section, names in entries().items():
        lines += [f"## {section}\n", "| name | in quire | remark |", "|---|---|---|"]
        for name, (target, note) in names.items():
            lines.append(f"| `{name}` | {f'`{target.replace(chr(58), chr(46))}`' if target else 'none'} | {note} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    for names in entries().values():
        for target, _ in names.values():
            if target:
                resolve(target)
    path = HERE / "index.md"
    if "--check" in sys.argv[1:]:
        return int(path.read_text() != page())
    path.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
