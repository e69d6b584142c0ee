"""The arithmetic of every check, on the CPU: durations and the memory of a device are not judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.run import CHECKS, findings
from tests.gpu.site import Site, no_network


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_is_right_on_the_cpu(name: str, tmp_path: Path) -> None:
    if name == "network" and (lacking := no_network()):
        pytest.skip(f"{lacking} is not installed")
    torch.set_num_threads(1)
    found = list(findings(Site(torch.device("cpu"), tmp_path, timed=False), [name]))
    assert [it.line() for it in found if it.right is False] == []
    assert any(it.right for it in found), [it.line() for it in found]


def test_every_file_of_checks_is_run() -> None:
    files = {it.stem for it in (Path(__file__).parent / "checks").glob("*.py")} - {"__init__"}
    assert files == set(CHECKS)
