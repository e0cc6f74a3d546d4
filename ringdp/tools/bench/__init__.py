"""``python -m ringdp bench``: how fast every collective is here, beside the peers' backends and with compressors.

`collectives` has the collectives with their expected results, `contenders` the backends and ring with a compressor,
`measuring` checks results and times blocks in turns, `output` prints tables and JSON. `command` is the command line.
"""
