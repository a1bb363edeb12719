"""The token ledger: a trajectory is append-only token ids with, per token, who wrote it and at which logprob.

Text is derived from tokens for parsing and display; nothing on the training path goes from text back to tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

UNSAMPLED = -1
"""Policy version of tokens that the policy did not write."""


@dataclass(slots=True)
class Trajectory:
    """One episode as the policy saw it. The four lists always have the same length."""

    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 where the policy sampled the token, else 0. Only these tokens are trained."""
    logprobs: list[float] = field(default_factory=list)
    """Logprob at which the token was sampled; 0.0 where the mask is 0, and never read there."""
    versions: list[int] = field(default_factory=list)
    """Policy version that sampled the token, `UNSAMPLED` where the mask is 0."""
    prompt_length: int = 0
    """Tokens before the first sampled one."""

    def append_context(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the policy reads but did not write: the prompt, observations, template markup."""
        if not any(self.mask):
            self.prompt_length += len(tokens)
        self.tokens.extend(tokens)
        self.mask.extend([0] * len(tokens))
        self.logprobs.extend([0.0] * len(tokens))
        self.versions.extend([UNSAMPLED] * len(tokens))

    def append_sampled(self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Appends tokens that the policy sampled, each with its logprob and the policy version that sampled it.

        Raises:
          ValueError: not one logprob and version per token. A ledger out of step must stop the rollout, not break the
            loss later.
        """
        if not len(tokens) == len(logprobs) == len(versions):
            raise ValueError(
                f"{len(tokens)} sampled tokens came with {len(logprobs)} logprobs and {len(versions)} versions"
            )
        self.tokens.extend(tokens)
        self.mask.extend([1] * len(tokens))
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy wrote."""
        return sum(self.mask)
