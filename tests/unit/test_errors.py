"""The exceptions: what they are, what they carry, and that a process can hand them to another."""

from __future__ import annotations

import copy
import pickle

import pytest

from ringdp import errors
from ringdp.errors import PeerLostError, RingError

BUILT_INS = {
    "PeerLostError": ConnectionError,
    "DamagedDataError": ConnectionError,
    "MembershipChanged": ConnectionError,
    "ExpelledError": ConnectionError,
    "RingTimeoutError": TimeoutError,
    "MismatchError": ValueError,
    "HandshakeError": ConnectionError,
    "InvalidArgumentError": ValueError,
    "InvalidStateError": RuntimeError,
    "RankError": RuntimeError,
    "SystemResourceError": OSError,
    "GradientOverflowError": OverflowError,
}


def test_each_is_also_the_built_in_it_resembles() -> None:
    ours = {name: value for name, value in vars(errors).items() if isinstance(value, type) and value is not RingError}
    ours = {name: value for name, value in ours.items() if issubclass(value, RingError)}
    assert set(ours) == set(BUILT_INS)
    for name, value in ours.items():
        assert issubclass(value, (BUILT_INS[name], RuntimeError)), name


@pytest.mark.parametrize("name", BUILT_INS)
def test_pickled_and_copied_with_all_fields(name: str) -> None:
    fields = {field: index for index, field in enumerate(RingError._fields)}
    error = getattr(errors, name)("what happened", **fields)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert str(again) == "what happened"
        assert {field: getattr(again, field) for field in RingError._fields} == fields
    assert copy.deepcopy(error).advice == fields["advice"]


def test_fields_are_none_where_nothing_is_known_and_others_are_refused() -> None:
    assert all(getattr(PeerLostError("gone"), field) is None for field in RingError._fields)
    with pytest.raises(TypeError, match="unknown fields: reason"):
        PeerLostError("gone", reason="none")
