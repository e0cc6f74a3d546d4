"""Start a script on several ranks: ``python launch.py --nproc-per-node 4 train.py``. See docs/how-to/launching.md."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from ringdp.launcher.__main__ import main
    except KeyboardInterrupt:  # Ctrl-C while torch is imported
        sys.exit(130)
    sys.exit(main())
