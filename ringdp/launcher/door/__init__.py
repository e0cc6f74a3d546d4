"""One open port for a job (``ringrun --door``): all other launchers dial it, and their ranks reach through it what they
cannot reach themselves.

The launcher with the door (`head.Door`) keeps the job's store on loopback. Each other one (`gate.Gate`) registers over
a connection that stays, gets the number of its host, and forwards a loopback port to that store. Ranks that cannot
connect to each other dial their own launcher (`local.Local`), which dials the door, which calls the launcher of the
other rank; that one dials back. Each connection proves the job's secret (`proof`) before any other byte of it is used;
then the core's Relay moves its bytes.
"""

from ringdp.launcher.door.passage import Passage, enter
from ringdp.launcher.door.proof import RefusedError

__all__ = ["Passage", "RefusedError", "enter"]
