"""The import contracts of pyproject.toml cover every module: a forbidden import breaks one anywhere."""

from __future__ import annotations

import tomllib
from copy import deepcopy
from pathlib import Path

import grimp
import pytest
from importlinter.configuration import configure
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract
from importlinter.domain.contract import ContractCheck

ROOT = Path(__file__).parents[3]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
configure()
KINDS = {"forbidden": ForbiddenContract, "layers": LayersContract}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        *SETTINGS["root_packages"], include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )


def checked(graph: grimp.ImportGraph, word: str) -> ContractCheck:
    """The contract with this word in its name. It removes from ``graph`` the imports that it ignores."""
    (options,) = [it for it in SETTINGS["contracts"] if word in it["name"]]
    own = {key: value for key, value in options.items() if key not in ("name", "type")}
    listed = {key: str(value) if isinstance(value, bool) else value for key, value in own.items()}
    contract = KINDS[options["type"]](name=options["name"], session_options=SETTINGS, contract_options=listed)
    return contract.check(graph, verbose=False)


def kept(graph: grimp.ImportGraph, word: str) -> bool:
    return bool(checked(deepcopy(graph), word).kept)


def test_hivemind_in_any_module_outside_p2p_breaks_a_contract(graph: grimp.ImportGraph) -> None:
    assert kept(graph, "hivemind")
    outside = [it for it in graph.modules if it.startswith(("peer", "dht_bootstrap")) and not it.startswith("peer.p2p")]
    assert len(outside) > 150
    broken = deepcopy(graph)
    for module in outside:
        broken.add_import(importer=module, imported="hivemind")
    found = checked(broken, "hivemind")
    assert not found.kept
    imports = [it for one in found.metadata["invalid_chains"] for chain in one["chains"] for it in chain]
    assert {it["importer"] for it in imports} == set(outside)


def test_every_package_of_peer_has_a_floor(graph: grimp.ImportGraph) -> None:
    assert kept(graph, "floors")
    graph.add_module("peer.attic")
    try:
        assert not kept(graph, "floors")
    finally:
        graph.remove_module("peer.attic")


def test_an_import_from_a_floor_above_breaks_a_contract(graph: grimp.ImportGraph) -> None:
    graph.add_import(importer="peer.rounds.types", imported="peer.swarm.context")
    try:
        assert not kept(graph, "floors")
    finally:
        graph.remove_import(importer="peer.rounds.types", imported="peer.swarm.context")
