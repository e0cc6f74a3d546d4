"""Joining a job and the backend ``ring``: who and where this rank is, and what carries its bytes."""
