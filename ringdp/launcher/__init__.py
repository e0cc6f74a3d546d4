"""The launcher: ``python launch.py ARGS``, ``ringrun ARGS`` and ``python -m ringdp.launch ARGS`` are the same.

Two processes: the supervisor (``supervisor.py``) owns the console, the signals and the cleaning up; the agent
(``agent.py``), forked from it, runs torch's elastic agent, which starts the ranks. docs/how-to/launching.md says why.
"""
