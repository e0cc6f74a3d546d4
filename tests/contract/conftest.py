"""Every contract holds over every transport of the core between ranks of one host.

All cases run over the transport that `auto` prefers. An operation sees a channel and not the transport, and
tests/cpp/test_channel.cpp holds every transport to what a channel must do; so the default tier runs over the others
only what is sampled, by a seed or by hypothesis, and what keeps channels full. All the rest over them is slow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

SAMPLED = {
    "test_collectives_core::test_any_mixture",
    "test_compressed_core::test_any_sections",
    "test_compressed_core::test_several_in_flight_beside_exact_ones",
    "test_finite_core::test_any_places",
    "test_messages_core::test_any_order_of_calls",
    "test_messages_core::test_large_messages_both_ways_at_once_do_not_block",
    "test_messages_core::test_a_flood_that_nobody_receives_yet_does_not_stop_the_others",
    "test_sampled_processes::test_sampled_calls",
}

OF_THEIR_OWN = {"test_start_core"}  # whose ranks are each on a host of its own: once is enough


def transport_names() -> list[str]:
    """In the order in which `auto` prefers them; without a build, whose tests are skipped, none is known."""
    try:
        from tests.core import _core
    except ImportError:
        return ["auto"]
    return [transport["name"] for transport in _core.registered_transports()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    preferred, *others = transport_names()
    module = metafunc.module.__name__.rpartition(".")[2]
    if module in OF_THEIR_OWN:
        others = []
    test = f"{module}::{metafunc.function.__name__}"
    marks = () if test in SAMPLED else pytest.mark.slow
    every = [preferred, *(pytest.param(name, marks=marks) for name in others)]
    metafunc.parametrize("transport", every, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """What ranks of one host use, in this process and in those it starts."""
    before = os.environ.get("RINGDP_TRANSPORT")
    os.environ["RINGDP_TRANSPORT"] = request.param
    yield request.param
    if before is None:
        del os.environ["RINGDP_TRANSPORT"]
    else:
        os.environ["RINGDP_TRANSPORT"] = before
