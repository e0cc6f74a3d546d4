"""What a job did last: its ranks' dumps, what they say together, and the commands around them."""
