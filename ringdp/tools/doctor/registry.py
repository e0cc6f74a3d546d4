"""The checks of one host, in the order of the report, and how they are run. A new one is a function and a line here."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping

from ringdp.tools.doctor.checks import machine, network, software
from ringdp.tools.doctor.checks.wide_area import wide_area
from ringdp.tools.doctor.finding import Finding, problem
from ringdp.tools.doctor.host import Host

Check = Callable[[Host], Iterable[Finding]]

CHECKS: Mapping[str, Check] = {
    "versions": software.versions,
    "settings": software.settings,
    "processor": machine.processor,
    "memory": machine.memory,
    "limits": machine.limits,
    "network": network.interfaces,
    "host name": network.host_name,
    "ports": network.ports,
    "wide-area links": wide_area,
    "clock": machine.clock,
    "GPUs and NCCL": software.devices,
}


def run_checks(host: Host, checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """All findings about this host. A check that fails is a finding itself: the others are still worth reading."""
    found: list[Finding] = []
    for name, check in checks.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                of_check = list(check(host))
            except Exception as error:
                logging.getLogger("ringdp.doctor").debug("check %s failed", name, exc_info=True)
                what = f"this check failed: {type(error).__name__}: {error}"
                of_check = [problem(what, "RINGDP_LOG_LEVEL=debug shows where; please report it")]
        found += [dataclasses.replace(one, check=name) for one in of_check]
    return found
