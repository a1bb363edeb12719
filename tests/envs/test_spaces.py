"""The space of any text (BR-57: Gymnasium's own Text admits ASCII letters and digits only)."""

import copy
import pickle

import gymnasium as gym
import pytest
from orchestra_envs import UnicodeText


def test_it_contains_any_text_of_a_length_in_range():
    space = UnicodeText(5, min_length=1)
    for text in ("a b", "é", "🚲\n", "12345", "\x00"):
        assert text in space
    for other in ("", "123456", 3, None, b"ab", ["a"]):
        assert other not in space
    assert "" in UnicodeText()
    assert "é" * 1_000_000 in UnicodeText()


def test_samples_are_short_contained_and_seeded():
    for space in (UnicodeText(seed=3), UnicodeText(2, seed=3), UnicodeText(200, min_length=150, seed=3)):
        samples = [space.sample() for _ in range(50)]
        assert all(sample in space for sample in samples)
        assert all(len(sample) <= space.min_length + 64 for sample in samples)
        space.seed(3)
        assert [space.sample() for _ in range(50)] == samples
        assert len(set(samples)) > 40
    with pytest.raises(ValueError, match="mask"):
        UnicodeText().sample(mask=(3, None))


def test_equality_copies_and_pickles():
    space = UnicodeText(9, min_length=2)
    assert space == UnicodeText(9, min_length=2) == copy.deepcopy(space) == pickle.loads(pickle.dumps(space))
    assert space != UnicodeText(9)
    assert space != gym.spaces.Text(9, min_length=2)
    assert eval(repr(space)) == space
    assert isinstance(space, gym.spaces.Text)


def test_a_batch_is_a_tuple_of_texts():
    batch = gym.vector.utils.batch_space(UnicodeText(), 3)
    assert ("a", "é", "") in batch


def test_gymnasiums_text_refuses_what_models_write():
    for text in ("a b", "é", ""):
        assert text not in gym.spaces.Text(5)
