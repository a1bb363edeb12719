"""The space of any text: observations and actions of tool environments."""

import string
from typing import Any

from gymnasium.spaces import Text

MAX_TEXT_CHARS = 1_000_000

_SAMPLE_CHARSET = string.printable[:94]  # visible ASCII


class UnicodeText(Text):
    """Every string of at most `max_length` code points, the empty one too.

    Gymnasium's `Text` admits only the characters of a small set and is slow with a large one. This subclass keeps
    its batching and its place in wrappers. `AsyncVectorEnv` needs `shared_memory=False`, since shared memory
    would be laid out for the charset.
    """

    def __init__(self, max_length: int = MAX_TEXT_CHARS, *, min_length: int = 0, seed: int | None = None) -> None:
        super().__init__(max_length, min_length=min_length, charset=_SAMPLE_CHARSET, seed=seed)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a string of a length in range; any characters."""
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A short string of visible ASCII (a million random characters would help nobody).

        Raises:
            ValueError: a mask or a probability is given; there is nothing to mask.
        """
        if mask is not None or probability is not None:
            raise ValueError("UnicodeText.sample takes no mask and no probability")
        shortest = min(max(self.min_length, 1), self.max_length)
        length = self.np_random.integers(shortest, min(self.max_length, shortest + 63), endpoint=True)
        return "".join(self.np_random.choice(list(_SAMPLE_CHARSET), size=length))

    def __repr__(self) -> str:
        """As it was made."""
        return f"UnicodeText({self.max_length}, min_length={self.min_length})"

    def __eq__(self, other: object) -> bool:
        """Equal type and equal bounds."""
        return isinstance(other, UnicodeText) and (other.min_length, other.max_length) == (
            self.min_length,
            self.max_length,
        )

    __hash__ = None  # type: ignore[assignment]  # mutable random state, like every Gymnasium space
