"""As in tau2-bench."""
