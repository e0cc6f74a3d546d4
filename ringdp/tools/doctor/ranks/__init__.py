"""The checks between the ranks of a job: whether they meet, reach each other, how fast, and with equal settings.

`meeting` is the rendezvous, which names missing ranks, `probe` the server and the client of a measurement, `edges` the
order of pairs and their results, `comparison` the ranks' versions and settings, `collective` a rendezvous and an
all-reduce of ring itself. `session` is the order of all of these.
"""
