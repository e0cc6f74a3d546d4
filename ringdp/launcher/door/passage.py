"""What ``--door`` and ``--join`` make of a command line: the store's address, and the number of this host."""

from __future__ import annotations

import argparse
import dataclasses
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from ringdp.config import RingConfig, read_address
from ringdp.launcher import joining
from ringdp.launcher.arguments import LOOPBACK, Arguments, meeting_of
from ringdp.launcher.door.gate import Gate
from ringdp.launcher.door.head import About, Door
from ringdp.launcher.door.proof import RefusedError, Trust


@dataclasses.dataclass(frozen=True)
class Passage:
    """Of a launcher whose job has a door.

    Attributes:
        way: this host's: the door itself, or a gate.
        arguments: with the rendezvous behind the door.
    """

    way: Door | Gate
    arguments: Arguments

    @property
    def environ(self) -> dict[str, str]:
        """For the ranks."""
        return {"RINGDP_DOOR": str(self.way.folder)}

    def meeting(self, handler: Any) -> None:
        """torch's rendezvous handler of the nodes: node 0 of them would open a store, and there is one."""
        args = self.arguments.torchrun
        if isinstance(handler, StaticTCPRendezvous):
            handler._store = TCPStore(
                args.master_addr, args.master_port, None, False, timeout=handler.timeout, wait_for_workers=False
            )

    def begun(self) -> None:
        """This host's ranks have been started, which are among the first."""
        if isinstance(self.way, Door):
            self.way.begun()


def enter(arguments: Arguments, say: Callable[[str], None]) -> Passage | None:
    """Open the door that is asked for, or go through the one to which ``--join`` leads; None: there is none. Blocks
    until the door answers. The environment has the settings of the job, its secret among them.

    Args:
        say: is given lines for the user.

    Raises:
        RefusedError: it does not let this host in.
    """
    args = arguments.torchrun
    if arguments.secret_file is None:  # one that this launcher has made for itself opens no door
        return None
    if args.door is None and (args.join is None or args.joins_store):
        return None
    trust = Trust(RingConfig.from_environment())
    if args.door is not None:
        return _open(arguments, args, trust, say)
    host, port = read_address(args.join)
    gate = Gate((host, port), trust, args.node_asked)
    try:
        about, node = gate.enter(args.rdzv_timeout or 600.0, say, lambda: joining.is_store(host, port))
    except BaseException as error:
        gate.close()
        if isinstance(error, RefusedError) and error.no_door:
            return None
        raise
    if node >= about.nodes:  # the ranks of the job have begun
        args.join, args.join_id = f"{LOOPBACK}:{gate.store_port}", ""
        return Passage(gate, arguments)
    args.join, args.join_id = None, ""
    args.elastic, args.max_restarts = about.elastic, about.max_restarts
    return Passage(gate, _behind(arguments, args, about, node, gate.store_port, f"the door at {host}:{port}"))


def _open(arguments: Arguments, args: argparse.Namespace, trust: Trust, say: Callable[[str], None]) -> Passage:
    nodes = int(args.nnodes.partition(":")[0])
    run_id = args.rdzv_id if args.rdzv_id != "none" else str(uuid.uuid4())
    about = About(here=args.node_rank, nodes=nodes, run_id=run_id, elastic=args.elastic, max_restarts=args.max_restarts)
    try:
        door = Door(args.door, trust, about, say)
    except OSError as error:
        raise RefusedError(f"--door {args.door}: {error.strerror or error}: choose another port") from error
    others = f": {nodes - 1} more to come" if nodes > 1 else ""
    say(f"the door is at port {door.port} of this host{others} (ringrun --join HOST:{door.port} --secret-file FILE)")
    return Passage(door, _behind(arguments, args, about, about.here, door.store_port, f"the door at port {door.port}"))


def _behind(
    arguments: Arguments, args: argparse.Namespace, about: About, node: int, store_port: int, endpoint: str
) -> Arguments:
    """The launchers meet at this port of their own hosts, each as this node."""
    args.nnodes, args.node_rank, args.rdzv_id = f"{about.nodes}:{about.nodes}", node, about.run_id
    args.rdzv_backend, args.rdzv_endpoint, args.standalone = "static", "", False
    args.master_addr, args.master_port = LOOPBACK, store_port
    meeting = dataclasses.replace(meeting_of(args), endpoint=endpoint)
    return dataclasses.replace(arguments, meeting=meeting if about.nodes > 1 else None)
