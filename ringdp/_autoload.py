"""The entry point that torch calls at the end of ``import torch`` (group ``torch.backends``)."""

from __future__ import annotations

import logging


def register() -> None:
    """Register the backend ``ring``; never raises, as an error would break ``import torch`` for everybody."""
    try:
        from ringdp.backend import register_backend

        register_backend()
    except Exception as error:
        # Whoever uses ringdp hears of it from `import ringdp`; others have no need to.
        logging.getLogger("ringdp.autoload").debug("the backend ring is not registered: %s", error)
