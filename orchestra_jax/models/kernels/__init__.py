"""Kernels for single platforms; what calls them picks by platform and checks them against XLA."""
