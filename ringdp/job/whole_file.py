"""Files that are either complete or absent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringdp.errors import SystemResourceError


@contextlib.contextmanager
def whole_file(path: Path, failure: str, *, make_folder: bool = False) -> Iterator[Any]:
    """A binary file to write to, which gets its name when the block has ended and all of it is on the disk.

    Args:
        failure: the beginning of the error's message.
        make_folder: make the folder of the file where it is missing.

    Raises:
        SystemResourceError: it cannot be written; what had the name before is as it was.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:  # torch.save hides what the system said
        raise SystemResourceError(f"{failure}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
