"""The embedded market: a simulated economy of tools to learn orchestration in, without network or keys.

It is a simulation. The calculator and the search engine do real work on generated questions and an invented library
(`tasks`, `corpus`, `tools`); the experts are random draws (`experts`). Published are the experts' prices and
latencies (ToolOrchestra, arXiv 2511.21689); the skills, answer lengths, and the prices of calculator and search are our
own choice. Results on it say something about learning to choose tools, nothing about the models whose names it uses.
"""
