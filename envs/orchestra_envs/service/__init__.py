"""The embedded customer-service world: four invented companies, their tools, policies, tasks and users.

Everything here was written for this package; worlds and tasks are generated and no data is embedded. `env` is the
environment, `generate` makes the tasks, `domains` has the companies; a new one is a module there with records, tools,
a policy, a random world and goal makers.
"""
