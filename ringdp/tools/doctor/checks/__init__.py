"""The checks of a host, a file for each subject: a function ``check(host)`` that yields findings.

The functions beside it that turn numbers into findings take the numbers alone, so that tests can give them any.
"""
