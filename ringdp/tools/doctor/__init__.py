"""``python -m ringdp doctor``: whether ringdp can work here and between these hosts, and what would make it faster.

`checks` examines one host, a file for each subject; `ranks` the network between the ranks of a job. Both yield
`finding.Finding`s, which `report` prints. `command` is the command line.
"""
