"""The demo users' hidden rule: does this answer satisfy? (pure)

The product never sees this rule, only the noisy feedback that it causes. A user wants a short, finished, plain answer
about the question, and minds junk: loops, echoes of the question, words without grammar.
"""

import re
from typing import NamedTuple

from deploy.demo_questions import Question

MIN_WORDS = 3
MAX_WORDS = 40
MIN_DISTINCT_PAIRS = 0.8  # share of distinct word pairs
MIN_NEW_WORDS = 1  # words that the question did not have, function words aside
FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an the of is are was were be been to in on at by for from with and or but as it its they their that this "
        "which who he she his her can have has had not do does did you your we our one there also used into than when "
        "where how what why i if so because about through between over under such other more most many some all no",
    )
)
FUNCTION_SHARE = (0.15, 0.75)  # plain English keeps within; word salad and stop-word mush do not
_CHOICE = re.compile(r"(\w+) or (?:in )?(?:an? )?(\w+)\?$")
_MARKUP = re.compile(r"[*#`|<>\[\]{}_\\]|https?:|^\s*(?:-|\d+[.)])\s", re.MULTILINE)


class Judgement(NamedTuple):
    """Whether the user is truly satisfied, and the first thing that was wrong."""

    satisfied: bool
    reason: str  # "" | too_short | too_long | unfinished | markup | repetitive | off_topic | echo | salad


def words_of(text: str) -> list[str]:
    """Split a text into lower-case words."""
    return re.findall(r"[a-z0-9']+", text.lower())


def mentions(words: list[str], phrase: str) -> bool:
    """Say whether the words hold the phrase, up to plural and possessive endings."""
    wanted = words_of(phrase)
    starts = range(len(words) - len(wanted) + 1)
    return any(all(is_same_word(words[at + i], word) for i, word in enumerate(wanted)) for at in starts)


def is_same_word(one: str, other: str) -> bool:
    """Say whether two words differ in a plural or possessive ending at most."""
    return bool(_singulars(one) & _singulars(other))


def _singulars(word: str) -> set[str]:
    """Return the word and everything that it may be a plural of: wolves -> wolf, octopuses -> octopus."""
    word = word.removesuffix("'s").removesuffix("'")
    forms = {word, {"mice": "mouse", "geese": "goose"}.get(word, word)}
    for ending, instead in (("s", ""), ("es", ""), ("ies", "y"), ("ves", "f"), ("ves", "fe")):
        if word.endswith(ending) and not word.endswith("ss") and len(word) > len(ending) + 2:
            forms.add(word.removesuffix(ending) + instead)
    return forms


def picks_one(question: Question, words: list[str]) -> bool:
    """Say whether the question is a choice (big or small?) and the answer names exactly one side."""
    choice = _CHOICE.search(question.text)
    return bool(choice) and mentions(words, choice[1]) != mentions(words, choice[2])


def is_on_topic(question: Question, text: str) -> bool:
    """Say whether the answer names the subject, its last word, an accepted answer, or picks one side of a choice."""
    words = words_of(text)
    names = (question.subject, question.subject.split()[-1], *question.accepted)
    return picks_one(question, words) or any(mentions(words, name) for name in names)


def is_repetitive(words: list[str]) -> bool:
    """Say whether the words loop: a repeated run of four, or few distinct pairs."""
    fours = [tuple(words[at : at + 4]) for at in range(len(words) - 3)]
    pairs = [tuple(words[at : at + 2]) for at in range(len(words) - 1)]
    return len(set(fours)) < len(fours) or len(set(pairs)) < MIN_DISTINCT_PAIRS * len(pairs)


def judge(question: Question, text: str, finish_reason: str) -> Judgement:
    """Judge one answer as its user truly would."""
    words = words_of(text)
    asked = words_of(question.text)
    content = [word for word in words if word not in FUNCTION_WORDS]
    new = {word for word in content if not any(is_same_word(word, other) for other in asked)}
    share = 1 - len(content) / max(1, len(words))
    stripped = text.strip()
    is_answered = picks_one(question, words) or any(mentions(words, answer) for answer in question.accepted)
    checks = (
        ("too_short", len(words) < MIN_WORDS),
        ("unfinished", finish_reason != "stop" or not stripped.endswith((".", "!", '."', ".)"))),
        ("too_long", len(words) > MAX_WORDS),
        ("markup", bool(_MARKUP.search(text)) or "\n\n" in stripped),
        ("repetitive", is_repetitive(words)),
        ("off_topic", not is_on_topic(question, text)),
        ("echo", len(new) < MIN_NEW_WORDS and not is_answered),
        ("salad", not FUNCTION_SHARE[0] <= share <= FUNCTION_SHARE[1]),
    )
    reason = next((name for name, wrong in checks if wrong), "")
    return Judgement(not reason, reason)
