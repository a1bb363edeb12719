"""One episode by the rollout that training uses, shown as it goes."""

from __future__ import annotations

from orchestra_jax.models.decoder import Params
from orchestra_jax.rollout.episode import Episode
from orchestra_jax.rollout.rollout import Job, Rollout
from orchestra_jax.solve.transcript import INTERRUPTED
from orchestra_jax.solve.view import View

CONVERSATION = 0
"""The key of the one conversation in the engine: its number among the jobs of the rollout."""


def growing_text(rollout: Rollout) -> str:
    """The turn under way, as far as its tokens have come."""
    text = rollout.chat.turn_text(rollout.engine.partial(CONVERSATION))
    # The last character may still lack bytes.
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    return "<think>" + text if text and rollout.chat.reasoning_open else text


def play(rollout: Rollout, params: Params, job: Job, view: View, *, scored: bool) -> Episode:
    """Runs one job and shows it; an interrupted one comes back as far as it got, with end_reason "interrupted".

    Args:
      rollout: of one slot.
      params: the policy's weights.
      job: what to run.
      view: where it is shown.
      scored: False where the environment's outcome means nothing: the episode then has none.
    """
    episode = Episode(job.seed, job.replica, token_texts=rollout.chat.tokenizer.token_texts)

    def watch(number: int, changed: Episode) -> None:
        nonlocal episode
        episode = changed
        if not scored:
            episode.outcome = None
        view.watch(number, changed)

    with view:
        try:
            (episode,) = rollout.run(params, [job], policy_version=0, watch=watch)
        except KeyboardInterrupt:
            episode.end_reason = INTERRUPTED
        view.finish(episode)
    return episode
