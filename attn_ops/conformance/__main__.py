"""``python -m quire.attn_ops.conformance --backend NAME``: prove a backend, see ``kit.py``."""

from quire.attn_ops.conformance.kit import main

if __name__ == "__main__":
    raise SystemExit(main())
