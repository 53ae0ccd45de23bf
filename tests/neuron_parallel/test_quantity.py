"""Contract: a number shows the formula that it was made by."""

from neuron_parallel.memory.quantity import Quantity


def test_a_quantity_shows_how_it_was_made():
    T, D = Quantity(10, "T"), Quantity(3, "D")
    assert (str(2 * T * D), (2 * T * D).value) == ("2*T*D", 60)
    assert (str(T * (D + 1)), (T / 4).value) == ("T*(D + 1)", 3)
