"""``python -m ringdp bench``: how fast every collective is here, beside the peers' backends and with compressors.

`collectives` knows what each one does and what must come out, `contenders` who does it (a backend, or ring with a
compressor), `measuring` checks results and times blocks in turns, `output` prints tables, JSON, CSV and pictures.
`command` is the command line.
"""
