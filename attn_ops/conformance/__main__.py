"""``python -m quire.attn_ops.conformance --backend NAME``."""

from quire.attn_ops.conformance.command import main

if __name__ == "__main__":
    raise SystemExit(main())
