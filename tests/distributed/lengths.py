"""An environment whose backend is down for every second task, so that whole groups are dropped."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from orchestra_envs import UnicodeText

FIRST_CHECKED = 1000
"""Tasks below are those that a run looks at before it begins; they work."""


class Lengths(gym.Env):
    observation_space, action_space = UnicodeText(), UnicodeText()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        if seed is not None and seed >= FIRST_CHECKED and seed % 2:
            raise ConnectionError("the backend is down")
        return "Say something.", {}

    def step(self, action: str):
        return "", float(len(action)), True, False, {}


gym.register("test/Lengths-v0", Lengths)
