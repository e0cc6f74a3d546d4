"""A compressor's result for a gradient on one rank alone, without an exchange: for measuring and checking."""

from __future__ import annotations

from torch import Tensor

from ringdp.compression.exchange.packing import forms_of
from ringdp.compression.exchange.rounds import Round, alone
from ringdp.compression.exchange.section import Coder, Section
from ringdp.compression.exchange.states import States


def there_and_back(section: Section, x: Tensor, *, rank: int = 0, ranks: int = 1, step: int = 0) -> tuple[Tensor, int]:
    """The decoded code of `x`, float32 ``[count]``, without error feedback and memory, and the bytes of the code."""
    coder = Coder(States(), rank, ranks, step, device=x.device)
    if getattr(section.compressor, "aggregate", "owner") != "rounds":
        payload = coder.compress(section, x, "rank", 0)
        return coder.decode(section, payload, "rank", 0), sum(form.nbytes for form in forms_of(payload))
    rounds: list[Round] = []
    decoded = alone(coder.average([section], [x]), rounds.append)[0]
    return decoded, sum(form.nbytes for _, forms in rounds for form in forms)
