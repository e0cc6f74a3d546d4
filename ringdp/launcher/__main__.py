"""The entry point of the launcher."""

from __future__ import annotations

import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Start the ranks, wait for them, and return the exit code.

    Args:
        argv: the command line without the program's name; None takes ``sys.argv``.

    Returns:
        0 when every rank of the job ended well, 1 when one failed, 2 for a command line that cannot be used,
        128 plus the signal's number when the launcher was stopped by one. A launcher stopped by Ctrl-C does not
        return: it dies of SIGINT itself, so that a shell script or make around it stops as well.
    """
    from ringdp import _early

    _early.hold()
    try:
        from ringdp.config import inheritance
        from ringdp.config.environments import dmlc
        from ringdp.launcher import supervisor

        for name in inheritance.inherited_by_launcher(os.environ):  # of a rank that has started this launcher
            os.environ.pop(name)
        dmlc.end_needless_role(os.environ)
        os.environ.update(dmlc.as_node(os.environ))

        return supervisor.launch(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        # Only while torch is imported: later the supervisor has handlers of its own.
        return 130


if __name__ == "__main__":
    sys.exit(main())
