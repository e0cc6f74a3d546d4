"""Jobs whose ranks come and go (``ringrun --elastic``): what a newcomer gets, and how the others let it in.

A lost rank costs no line of the script. Ranks that join, or leave without a loss, need to know what makes up the state
of the training, and where a step begins: `Job`. `unit` is for collectives of the script.
"""

from ringdp.elastic.job import Change, Job
from ringdp.elastic.loader import Loader
from ringdp.elastic.units import unit

__all__ = ["Change", "Job", "Loader", "unit"]
