"""The entry point that torch calls at the end of ``import torch`` (group ``torch.backends``)."""

from __future__ import annotations

import logging


def register() -> None:
    """Register the backend ``ring``; never raises, as an error would break ``import torch`` for every program."""
    try:
        from ringdp.job.backend import register_backend

        register_backend()
    except Exception as error:
        # A program that uses ringdp gets the error from `import ringdp`; others do not need it.
        logging.getLogger("ringdp.autoload").debug("the backend ring is not registered: %s", error)
