"""``python -m ringdp.launch ARGS`` is ``ringrun ARGS``; the function `ringdp.launch` is in job/local_ranks.py."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from ringdp.launcher.__main__ import main
    except KeyboardInterrupt:  # Ctrl-C while torch is imported
        sys.exit(130)
    sys.exit(main())
