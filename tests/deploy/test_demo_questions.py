"""The demo's questions: many, distinct, and held-out ones that share nothing with training."""

from deploy.demo_questions import TOPICS, held_out_questions, training_questions


def test_there_are_enough_distinct_questions():
    training, held_out = training_questions(seed=1), held_out_questions()
    assert len({question.text for question in training}) == len(training) >= 1500
    assert len({question.text for question in held_out}) == len(held_out) >= 120


def test_held_out_questions_share_no_entity_and_no_template_with_training():
    training, held_out = training_questions(seed=1), held_out_questions()
    assert not {(q.topic, q.subject) for q in training} & {(q.topic, q.subject) for q in held_out}
    for topic in TOPICS:
        assert not set(topic.training) & set(topic.held_out)


def test_the_same_seed_gives_the_same_order_and_another_seed_another():
    assert training_questions(seed=1) == training_questions(seed=1) != training_questions(seed=2)
    assert sorted(training_questions(seed=1)) == sorted(training_questions(seed=2))


def test_a_question_with_a_known_answer_carries_it():
    answers = {q.subject: q.accepted for q in training_questions(seed=1) if q.topic == "capitals"}
    assert answers["France"] == ("Paris",)


def test_the_article_fits_the_entity():
    texts = {question.text for question in training_questions(seed=1)}
    assert "What is an axe used for?" in texts
    assert "What is a hammer used for?" in texts
    assert not [text for text in texts if " a oak" in text or " a an " in text or " a umbrella" in text]
