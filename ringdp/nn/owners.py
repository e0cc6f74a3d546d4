"""The owners of a table's rows: a permutation of the rows, dealt to the ranks in turn."""

from __future__ import annotations

import math

from torch import Tensor

_GOLDEN = (math.sqrt(5) - 1) / 2


class RowOwners:
    """Row ``id`` has the place ``id * factor mod rows``, which belongs to rank ``place mod ranks``.

    Neighbouring rows, which often are popular together, go to different ranks. No table of places is needed, and the
    places do not depend on the number of ranks. Knuth, The Art of Computer Programming, volume 3, section 6.4
    (multiplicative hashing).
    """

    def __init__(self, rows: int, rank: int, ranks: int) -> None:
        self.rows, self.rank, self.ranks = rows, rank, ranks
        factor = max(1, round(rows * _GOLDEN))
        while math.gcd(factor, rows) != 1:
            factor += 1
        self.factor = factor
        self._inverse = pow(factor, -1, rows) if rows > 1 else 0

    @property
    def count(self) -> int:
        """This rank's rows."""
        return len(range(self.rank, self.rows, self.ranks))

    def places(self, ids: Tensor) -> Tensor:
        """int64, as `ids`."""
        return ids * self.factor % self.rows

    def ids(self, places: Tensor) -> Tensor:
        """The rows that have these places."""
        return places * self._inverse % self.rows
