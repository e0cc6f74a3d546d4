"""Where the time of training steps goes, on all ranks: the report, its verdict, metrics, and the timeline."""
