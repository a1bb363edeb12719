"""Packing: every sampled token is a target exactly once, at its own position, behind its own context."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestra_jax.rollout.ledger import Trajectory
from orchestra_jax.rollout.pack import PackedBatch, TrainSequence, pack, pad_rows

ROW_TOKENS, ROW_TARGETS = 24, 12
END = 2  # also the padding id of many tokenizers, and a frequent id in the rows below


def trajectory_of(prompt: list[int], turns: list[tuple[bool, list[int]]]) -> Trajectory:
    trajectory = Trajectory()
    trajectory.append_context(prompt)
    for sampled, tokens in turns:
        if sampled:
            trajectory.append_sampled(
                tokens, [-(len(trajectory.tokens) + i) / 8 for i in range(len(tokens))], [0] * len(tokens)
            )
        else:
            trajectory.append_context(tokens)
    return trajectory


def small_ids(min_size: int, max_size: int):
    return st.lists(st.integers(0, 3), min_size=min_size, max_size=max_size)


prompts = st.sampled_from([[2], [2, 2], [1, 2, 3], [1, 2, 3, 0, 2], [0, 0, 0]])
turns = st.lists(st.tuples(st.booleans(), small_ids(0, 4)), min_size=1, max_size=4)
trajectories = st.builds(trajectory_of, prompts, turns).filter(lambda t: t.num_sampled <= ROW_TARGETS)
sequences = st.lists(
    st.builds(TrainSequence, trajectories, st.integers(-4, 4).map(float), st.sampled_from([0.0, 0.25, 0.5])),
    max_size=14,
)


def contexts_and_targets(batch: PackedBatch) -> list[tuple]:
    """What the loss sees, from the arrays alone: (visible tokens, target, logprob, advantage, weight) per target."""
    seen = []
    for row in range(batch.tokens.shape[0]):
        segments, prefixes, positions = batch.segments[row], batch.prefixes[row], batch.positions[row]
        for i in np.flatnonzero(batch.target_segments[row]):
            source = batch.sources[row, i]
            owners = (segments == segments[source]) | (segments == prefixes[source])
            visible = np.flatnonzero(owners & (positions <= positions[source]) & (segments > 0))
            visible = visible[np.argsort(positions[visible])]
            assert positions[visible].tolist() == list(range(len(visible)))  # each position once, none missing
            seen.append(
                (
                    tuple(batch.tokens[row, visible].tolist()),
                    int(batch.targets[row, i]),
                    float(batch.behavior_logprobs[row, i]),
                    float(batch.advantages[row, i]),
                    float(batch.weights[row, i]),
                )
            )
    return sorted(seen)


@settings(max_examples=200, deadline=None)
@given(sequences)
def test_every_sampled_token_is_predicted_from_its_own_context(sequences):
    batch = pack(sequences, ROW_TOKENS, ROW_TARGETS)
    expected = [
        (tuple(t.tokens[:i]), t.tokens[i], t.logprobs[i], s.advantage, s.weight)
        for s in sequences
        if s.weight
        for t in [s.trajectory]
        for i in range(len(t.tokens))
        if t.mask[i]
    ]
    assert contexts_and_targets(batch) == sorted(expected)


@settings(max_examples=100, deadline=None)
@given(sequences)
def test_padding_is_known_from_lengths_and_never_from_ids(sequences):
    batch = pack(sequences, ROW_TOKENS, ROW_TARGETS)
    for name, length in (("segments", ROW_TOKENS), ("target_segments", ROW_TARGETS)):
        array = getattr(batch, name)
        assert array.shape == (len(batch.tokens), length)
        live = array > 0
        assert (live[:, :-1] | ~live[:, 1:]).all()  # padding stands at the end only
    padding = batch.target_segments == 0
    assert not batch.weights[padding].any()
    assert (batch.weights[~padding] > 0).all()
    live_ends = (batch.targets == END) & ~padding
    sampled_ends = sum(
        int(t == END and m == 1) for s in sequences if s.weight for t, m in zip(s.trajectory.tokens, s.trajectory.mask)
    )
    assert live_ends.sum() == sampled_ends
    # Tokens of one sequence stand together among the targets, as the sequence ratio of GSPO needs.
    for row in batch.target_segments:
        ids = row[row > 0].tolist()
        assert len(set(ids)) == sum(a != b for a, b in zip(ids, [None, *ids]))


def test_a_group_shares_its_prompt():
    prompt = [5, 6, 7, 8]
    group = [TrainSequence(trajectory_of(prompt, [(True, [i, END])]), 1.0, 0.5) for i in range(4)]
    batch = pack(group, 12, 8)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 0, 2, 1, 2, 2, 2, 3, 2]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5, 4, 5, 4, 5, 4, 5]]
    assert batch.segments.tolist() == [[1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]]
    assert batch.prefixes.tolist() == [[1] * 12]
    assert batch.sources.tolist() == [[3, 4, 3, 6, 3, 8, 3, 10]]
    assert batch.targets.tolist() == [[0, 2, 1, 2, 2, 2, 3, 2]]
    # One token less, and the last member opens a row with a copy of the prompt.
    assert pack(group, 11, 8).tokens.shape[0] == 2
    assert pack(group, 12, 7).tokens.shape[0] == 2


def test_sequences_without_anything_to_learn_are_left_out():
    silent = TrainSequence(trajectory_of([1] * 99, [(False, [1])]), 1.0, 1.0)
    weightless = TrainSequence(trajectory_of([1] * 99, [(True, [1])]), 1.0, 0.0)
    batch = pack([silent, weightless], 8, 8)
    assert batch.tokens.shape == (0, 8)
    assert pad_rows(batch, 3).segments.tolist() == [[0] * 8] * 3


@pytest.mark.parametrize(("row_tokens", "row_targets"), [(5, 8), (8, 2)])
def test_too_long_a_trajectory_is_refused_not_cut(row_tokens, row_targets):
    sequence = TrainSequence(trajectory_of([1, 1, 1], [(True, [4, 5, 6])]), 1.0, 1.0)
    with pytest.raises(ValueError, match=r"6 tokens \(3 sampled\).*train\.row_tokens"):
        pack([sequence], row_tokens, row_targets)


def test_a_trajectory_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="no prompt"):
        pack([TrainSequence(trajectory_of([], [(True, [4])]), 1.0, 1.0)], 8, 8)


def test_rows_are_padded_but_never_cut():
    batch = pack([TrainSequence(trajectory_of([1], [(True, [4])]), 1.0, 1.0)], 4, 2)
    padded = pad_rows(batch, 3)
    assert all(x.shape[0] == 3 for x in padded)
    assert not padded.weights[1:].any()
    for before, after in zip(batch, padded, strict=True):
        np.testing.assert_array_equal(after[:1], before)
    with pytest.raises(ValueError, match="3 rows cannot be padded to 2"):
        pad_rows(padded, 2)
