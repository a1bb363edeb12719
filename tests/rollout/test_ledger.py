"""The ledger: ids as sampled, with mask, logprob and version of each, whatever is appended in whatever order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestra_jax.rollout.ledger import UNSAMPLED, Trajectory

PAD = END = 2  # a tokenizer whose padding token is its end token

ids = st.lists(st.integers(0, 9), max_size=6)
turns = st.lists(st.tuples(st.booleans(), ids), max_size=8)


@given(turns)
def test_every_token_keeps_who_wrote_it(turns):
    trajectory = Trajectory()
    expected: list[tuple[int, int, float, int]] = []
    for version, (sampled, tokens) in enumerate(turns):
        before = list(trajectory.tokens)
        if sampled:
            logprobs = [-0.5 * (i + 1) for i in range(len(tokens))]
            trajectory.append_sampled(tokens, logprobs, [version] * len(tokens))
            expected += [(token, 1, logprob, version) for token, logprob in zip(tokens, logprobs)]
        else:
            trajectory.append_context(tokens)
            expected += [(token, 0, 0.0, UNSAMPLED) for token in tokens]
        assert trajectory.tokens[: len(before)] == before  # append-only
    columns = (trajectory.tokens, trajectory.mask, trajectory.logprobs, trajectory.versions)
    assert list(zip(*columns, strict=True)) == expected
    assert trajectory.num_sampled == sum(len(tokens) for sampled, tokens in turns if sampled)
    first = next((i for i, entry in enumerate(expected) if entry[1]), len(expected))
    assert trajectory.prompt_length == first


def test_ids_that_text_would_merge_are_kept():
    # " to" + "ol" would be encoded as one " tool": nothing here goes through text.
    trajectory = Trajectory()
    trajectory.append_context([1, 4093])
    trajectory.append_sampled([288, 308], [-1.0, -2.0], [0, 0])
    trajectory.append_context([5, 6])
    assert trajectory.tokens == [1, 4093, 288, 308, 5, 6]
    assert trajectory.mask == [0, 0, 1, 1, 0, 0]
    assert trajectory.logprobs[2:4] == [-1.0, -2.0]


def test_template_markup_around_a_turn_is_not_trained():
    # <im_start> assistant \n | H I <im_end> | \n
    trajectory = Trajectory()
    trajectory.append_context([10, 11, 12, 13, 14])
    trajectory.append_sampled([20, 21, END], [-0.1, -0.2, -0.3], [0, 0, 0])
    trajectory.append_context([30])
    assert trajectory.mask == [0] * 5 + [1] * 3 + [0]


def test_an_end_token_that_the_harness_appends_has_no_logprob_to_train_on():
    trajectory = Trajectory()
    trajectory.append_context([4])
    trajectory.append_sampled([5, 6], [-1.0, -1.0], [0, 0])
    trajectory.append_context([END])
    assert trajectory.mask == [0, 1, 1, 0]
    assert trajectory.versions[-1] == UNSAMPLED


@pytest.mark.parametrize("logprobs", [[], [-1.0], [-1.0] * 3])
def test_a_ledger_out_of_step_stops_at_once_and_stays_as_it_was(logprobs):
    trajectory = Trajectory()
    trajectory.append_context([1])
    with pytest.raises(ValueError, match=f"2 sampled tokens came with {len(logprobs)} logprobs"):
        trajectory.append_sampled([7, 8], logprobs, [0, 0])
    assert trajectory.tokens == [1]
    assert trajectory.mask == [0]
