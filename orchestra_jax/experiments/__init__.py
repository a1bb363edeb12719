"""The paper's experiments in the simulated market: training runs, evaluations, and a page written by script."""
