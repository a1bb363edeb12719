"""A stand-in for tau2-bench in tests: the part of its interface that the wrapper uses, with a small domain of its own.

The domain "desk" is the counter of a lending library: `books` with a holder each, `cards` of readers that may be
locked, and the reader's own tools to look at their card and to unlock it.
"""
