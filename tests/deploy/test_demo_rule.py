"""The demo users' hidden rule."""

import pytest

from deploy.demo_questions import Question
from deploy.demo_rule import judge, mentions, words_of

OTTERS = Question("What do otters eat?", "animals", "otters")
BIG = Question("Are penguins big or small?", "animals", "penguins")
MEAL = Question("Is ham a snack or a meal?", "food", "ham")
PARIS = Question("What is the capital of France?", "capitals", "France", ("Paris",))


@pytest.mark.parametrize(
    ("question", "text"),
    [
        (OTTERS, "Otters eat fish, crabs and other small animals that live in rivers."),
        (OTTERS, "An otter eats mostly fish. It also eats crabs and frogs."),
        (PARIS, "The capital of France is Paris."),
        (BIG, "Penguins are small."),
        (BIG, "They are very big birds."),
        (MEAL, "It is a snack."),
        (PARIS, "It is the city of Paris."),
    ],
)
def test_a_short_plain_answer_satisfies(question, text):
    assert judge(question, text, "stop") == (True, "")


@pytest.mark.parametrize(
    ("text", "finish_reason", "reason"),
    [
        ("Otters fish.", "stop", "too_short"),
        ("", "stop", "too_short"),
        ("Otters eat fish and crabs that they find in", "length", "unfinished"),
        ("Otters eat fish and crabs that they find in", "stop", "unfinished"),
        ("Otters eat " + ", ".join(f"food{number}" for number in range(60)) + ".", "stop", "too_long"),
        ("- Otters eat fish\n- and crabs in the river.", "stop", "markup"),
        ("**Otters** eat fish and crabs in the river.", "stop", "markup"),
        ("Otters eat fish and crabs. Otters eat fish and crabs.", "stop", "repetitive"),
        ("They eat fish and crabs in the river.", "stop", "off_topic"),
        ("What do otters eat? The otters eat.", "stop", "echo"),
        ("Otters fish river crabs frogs water tail fur.", "stop", "salad"),
    ],
)
def test_the_first_fault_is_named(text, finish_reason, reason):
    assert judge(OTTERS, text, finish_reason) == (False, reason)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("A wolf hunts", "wolves"),
        ("Wolves hunt", "wolf"),
        ("The fox's den", "foxes"),
        ("A butterfly drinks", "butterflies"),
        ("The ladies", "lady"),
        ("Glass breaks", "glass"),
        ("An olive oil bottle", "olive oil"),
        ("A mouse", "mice"),
        ("The octopus", "octopuses"),
        ("A bus", "bus"),
        ("horse and horses", "horses"),
        ("A giraffe", "giraffes"),
        ("The axe", "axe"),
        ("The toaster is hot", "toaster"),
        ("A Jupiter year", "Jupiter"),
    ],
)
def test_plural_and_possessive_endings_do_not_matter(text, phrase):
    assert mentions(words_of(text), phrase)


def test_a_choice_is_answered_by_one_side_only():
    assert judge(BIG, "They are big and small.", "stop") == (False, "off_topic")
    assert judge(BIG, "Are penguins big or small?.", "stop") == (False, "echo")
    assert judge(MEAL, "It is good food.", "stop") == (False, "off_topic")


def test_a_part_of_a_word_is_no_mention():
    assert not mentions(words_of("The category is broad"), "cat")
