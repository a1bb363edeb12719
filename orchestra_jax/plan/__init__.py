"""`orchestra plan`: the train step of a config compiled ahead of time for accelerators that are not here."""
