"""``python -m ringdp.launch ARGS`` is ``ringrun ARGS``; imported, this is the function `ringdp.launch`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from ringdp.launcher.__main__ import main
    except KeyboardInterrupt:  # Ctrl-C while torch is imported
        sys.exit(130)
    sys.exit(main())
else:
    from ringdp.job.local_ranks import launch

    sys.modules[__name__] = launch  # type: ignore[assignment]  # else `import ringdp.launch` would hide the function
