"""One question, one trained policy, live tools: what `orchestra solve` does.

`source` reads what a folder says of its policy, `question` makes an environment of the user's question, `transcript`
puts an episode into words, `view` shows it as it goes, and `play` runs it by the rollout that training uses.
"""
