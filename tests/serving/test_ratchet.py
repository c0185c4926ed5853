"""The ratchet guard's budget."""

from serving.gates import ratchet


def test_a_proven_gain_costs_nothing_and_earns_no_credit():
    assert ratchet.deficit(0.2) == 0.0
    assert ratchet.deficit(-0.03) == 0.03


def test_small_possible_losses_add_up_to_a_freeze():
    assert not ratchet.is_breached([0.02, 0.0, 0.03], 0.05)
    assert ratchet.is_breached([0.02, 0.02, 0.02], 0.05)
