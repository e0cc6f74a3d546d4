"""The dumps of a job's ranks: how they are asked for (`dump`), read (`dump_files`), judged (`verdict`) and shown
(`explain`)."""
