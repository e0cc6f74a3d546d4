"""What happens to a full bucket: communication hooks, one file each."""
