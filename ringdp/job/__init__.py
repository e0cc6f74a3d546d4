"""Joining a job, and the backend ``ring``: this rank's number, its device, and the backend of its tensors."""
