"""Reading values in messages, and what counts as telling a fact."""

import pytest
from orchestra_envs.service.facts import mentions, told, values_of
from orchestra_envs.service.goals import Fact


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("You get $12.50 back.", {"12.5"}),
        ("You get 12.5 dollars, or 12,50.", {"12.5"}),
        ("It is $1,250.00 (USD 1250).", {"1250"}),
        ("1,250,000.", {"1250000"}),
        ("Order O-12345 of 2026-03-14 at 09:30 costs 7.", {"7"}),
        ("In R-101 and PT-12345 nothing.", set()),
        ("Three of them, 10% off.", {"3", "10"}),
        ("On 14 March 2026, at 4:15 pm.", set()),
        ("12.50.", {"12.5"}),
        ("12.50, 13, and 14", {"12.5", "13", "14"}),
        ("-5 and +6", {"5", "6"}),
        ("abc123 1st 2nd", set()),
        ("", set()),
    ],
)
def test_numbers(text, values):
    assert values_of(text, "number") == values


@pytest.mark.parametrize(
    "text",
    [
        "2026-03-04",
        "4 March 2026",
        "March 4, 2026",
        "the 4th of March 2026",
        "04.03.2026",
        "Mar 4th 2026",
        "3/4/2026",
    ],
)
def test_dates_with_a_year(text):
    assert values_of(f"It is {text}.", "date") == {"2026-03-04"}


@pytest.mark.parametrize("text", ["4 March", "March 4", "Mar. 4th", "on the 4th of march"])
def test_dates_without_a_year(text):
    assert values_of(f"It is {text}.", "date") == {"-03-04"}
    assert mentions(text, Fact("date", "2026-03-04", "?"))
    assert not mentions(text, Fact("date", "2026-03-05", "?"))


def test_impossible_dates_are_none():
    assert values_of("30 February 2026, 2026-13-01", "date") == set()


@pytest.mark.parametrize(("text", "value"), [("09:30", "09:30"), ("9:30 am", "09:30"), ("4:15 p.m.", "16:15")])
def test_times(text, value):
    assert values_of(f"At {text} sharp.", "time") == {value}


def test_names_ignore_case_and_blanks_but_not_letters():
    rooms = ("Garden Single", "Tower Suite")
    assert values_of("the  garden\nSINGLE.", "name", rooms) == {"garden single"}
    assert values_of("a Garden Singles", "name", rooms) == set()


REFUND = Fact("number", "32.40", "How much?")


def test_an_explained_amount_is_told():
    message = "3 lamps at $12.00 make $36.00; 10 percent, $3.60, are kept, so you get $32.40 back."
    assert told([REFUND], [message]) == [True]


@pytest.mark.parametrize("text", ["You get 32.40.", "$32.4", "USD 32,40"])
def test_notations(text):
    assert told([REFUND], [text]) == [True]


@pytest.mark.parametrize("text", ["You get 32.", "You get 132.40.", "O-3240", "nothing", "", "32.400001"])
def test_other_values_tell_nothing(text):
    assert told([REFUND], [text]) == [False]


def test_listing_numbers_tells_nothing():
    assert told([REFUND], [" ".join(f"{n}.40" for n in range(100))]) == [False]
    assert told([REFUND], [f"{n}.40 {n + 1}.40" for n in range(0, 40, 2)]) == [False]


def test_a_listing_does_not_spoil_what_is_told_later():
    listing = "Your orders: " + ", ".join(f"${n}.10" for n in range(30))
    assert told([REFUND], [listing, "You get $32.40."]) == [True]


def test_decoys():
    dues = tuple(f"2026-05-{day:02d}" for day in range(1, 7))
    fact = Fact("date", "2026-05-03", "When?", dues)
    assert told([fact], ["It is due on 3 May 2026."]) == [True]
    assert told([fact], ["Due: " + ", ".join(dues)]) == [False]
    assert told([fact], ["Due: " + ", ".join(dues), "That one is due on May 3."]) == [True]
    assert told([fact], [f"Due: {day}" for day in dues]) == [False]
    assert told([fact], [f"{a} or {b}" for a, b in zip(dues[::2], dues[1::2])]) == [False]
    assert told([fact], [", ".join(dues[:3]), ", ".join(dues[3:])]) == [False]
    name = Fact("name", "Tower Suite", "Which?", ("Tower Suite", "Garden Single", "Attic", "Barn", "Cellar"))
    assert told([name], ["The tower suite."]) == [True]
    assert told([name], ["Tower Suite, Garden Single, Attic, Barn, Cellar."]) == [False]


def test_what_the_user_said_does_not_count_as_listing():
    users = ("I want 1 2 3 4 5 6 7 8 9 10 of them",)
    assert told([REFUND], ["1 2 3 4 5 6 7 8 9 10 of them: 32.40"], users) == [True]


def test_four_requests_fit_into_one_summary():
    facts = [Fact("number", f"{n}5.50", "?") for n in range(1, 5)]
    message = "Refund $15.50 (fee 2), refund $25.50 (fee 3), total 35.50 for 6 nights, and 45.50."
    assert told(facts, [message]) == [True] * 4
