"""The contract: which rules are raised and which are recorded is said by name, and only names of rules are taken."""

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from nki_sim.rules import RULES
from sim_harness import sb


def wrong():
    nisa.memset(sb(128, 4)[8:16], 0)
    nisa.memset(nl.ndarray((8, 4), "int32"), 2.0)


def test_the_innermost_context_that_names_a_rule_decides_about_it():
    both = ["start-partition", "memset-value"]
    with nki_sim.checks(record=both) as outer:
        with nki_sim.checks(record=["memset-value"]) as inner:
            nki_sim.simulate(wrong)()
        assert [f.rule for f in inner] == ["memset-value"] and [f.rule for f in outer] == ["start-partition"]
        with nki_sim.checks(refuse=["memset-value"]), pytest.raises(nki_sim.NkiError, match=r"^memset-value"):
            nki_sim.simulate(wrong)()
    with pytest.raises(nki_sim.NkiError, match=r"^start-partition"):
        nki_sim.simulate(wrong)()


@pytest.mark.parametrize("kind", ["record", "refuse"])
def test_a_name_that_is_no_rule_is_refused_with_the_one_that_was_meant(kind):
    with (
        pytest.raises(ValueError, match=r"'zero-trips' is no rule.*did you mean 'zero-trip'"),
        nki_sim.checks(**{kind: ["zero-trips"]}),
    ):
        pass


def test_every_rule_says_what_it_refuses_and_on_whose_word():
    for name, rule in RULES.items():
        assert rule.refuses and rule.source.startswith("["), name


def test_recorded_findings_are_noted_once():
    with nki_sim.checks(record=["memset-value"]) as findings:
        for _ in range(2):
            nki_sim.simulate(lambda x: wrong_value() and x)(np.zeros((2, 2), np.float32))
    assert len(findings) == 1


def wrong_value():
    nisa.memset(nl.ndarray((8, 4), "int32"), 2.0)
    return True
