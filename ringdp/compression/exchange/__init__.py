"""How the ranks' payloads of a bucket become one mean: the messages, the adding ranks, the order. Moves no bytes
itself.

`layout` is where to begin: it cuts a bucket into sections and runs the exchange of each kind of aggregate (in `owner`,
`whole` and `rounds`), a generator that yields `requests` and is sent their answers. A process group answers them, or a
simulation of all ranks in one process.
"""

from ringdp.compression.exchange.agreement import agree
from ringdp.compression.exchange.layout import BucketSlice, Layout
from ringdp.compression.exchange.requests import AllGather, AllReduce, AllToAll, Exchange, Request
from ringdp.compression.exchange.section import Coder, Section
from ringdp.compression.exchange.sparsity import Sparsity, Tally
from ringdp.compression.exchange.states import Key, Remembered, States

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "BucketSlice",
    "Coder",
    "Exchange",
    "Key",
    "Layout",
    "Remembered",
    "Request",
    "Section",
    "Sparsity",
    "States",
    "Tally",
    "agree",
]
