"""Each element in fewer bits and back: the core's codecs, the same in torch operations, and those loaded from C."""
