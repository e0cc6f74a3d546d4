"""The checks of a host, a file for each subject: functions of a host that yield findings, each named in the registry.

The functions beside them that turn numbers into findings take the numbers alone, so that tests can give them any.
"""
