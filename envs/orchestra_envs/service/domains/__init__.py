"""The domains of the service world: each module has records, tools, a policy text, a world and goal makers."""

from orchestra_envs.service.domains import clinic, hotel, library, shop
from orchestra_envs.service.goals import Domain

DOMAINS: dict[str, Domain] = {module.DOMAIN.name: module.DOMAIN for module in (shop, clinic, hotel, library)}
