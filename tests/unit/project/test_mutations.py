"""The list of mutations that the simulation must find fits the code that it mutates."""

from __future__ import annotations

import ast
from collections import Counter

from tests.simulated.mutate import ROOT, mutations


def test_each_mutation_can_be_applied() -> None:
    for mutation in mutations():
        text = (ROOT / mutation.file).read_text()
        assert text.count(mutation.before) == 1, f"{mutation.name}: {mutation.file} has changed; mend mutations.toml"
        ast.parse(text.replace(mutation.before, mutation.after))


def test_there_are_enough_and_each_has_its_name_and_its_promises() -> None:
    found = mutations()
    assert len(found) >= 25
    assert max(Counter(it.name for it in found).values()) == 1
    assert all(it.notices and it.before != it.after for it in found)
