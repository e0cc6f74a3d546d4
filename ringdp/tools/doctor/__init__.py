"""``python -m ringdp doctor``: whether ringdp can work here and between these hosts, and what would make it faster.

`checks` looks at one host, a file for each subject; `ranks` at what lies between the ranks of a job. Both say
`finding.Finding`s, which `report` prints. `command` is the command line.
"""
