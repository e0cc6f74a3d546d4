"""Start a script on several ranks: ``python launch.py --nproc-per-node 4 train.py``. See docs/how-to/launching.md."""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    # Those are for the ranks: kept until the launcher can pass them on, which torch's import delays by seconds.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    try:
        from ringdp.launcher.__main__ import main
    except KeyboardInterrupt:  # Ctrl-C while torch is imported
        sys.exit(130)
    sys.exit(main())
