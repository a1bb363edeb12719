"""A trained policy at work beside "always the strongest expert", in a terminal: what `orchestra demo` shows.

`episodes` plays the tasks, `timeline` says what of an episode is to be seen at which moment, `view` draws it. The
policy in `policy/` is the quickstart's; its `run.yaml` says how it was made.
"""
