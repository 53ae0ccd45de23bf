"""The contract: the page lists every rule as rules.py has it, and every rule that code names is one."""

import re
from pathlib import Path

import nki_sim
import pytest
from nki_sim.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "nki-sim.md"
NAMED = re.compile(r'(?:refuse\(|need\((?:[^",()]|\([^()"]*\))*,\s*)\s*"([a-z][a-z-]+)",')


@pytest.mark.parametrize("name", RULES)
def test_the_page_has_each_rule_with_its_source(name):
    rule = RULES[name]
    noted = " (recorded by default)" if rule.recorded else ""
    assert f"| `{name}` | {rule.refuses}{noted} | {rule.source} |" in PAGE.read_text()


def test_the_page_lists_no_other_rules():
    table = PAGE.read_text().split("| rule | refuses | source |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z-]+)`", table, re.MULTILINE)) == set(RULES)


def test_every_rule_is_used_and_every_name_used_is_a_rule():
    source = "\n".join(p.read_text() for p in Path(nki_sim.__file__).parent.rglob("*.py") if p.name != "rules.py")
    used = set(NAMED.findall(source))
    assert len(used) > 40 and used <= set(RULES)
    assert not [name for name in RULES if f'"{name}"' not in source]
