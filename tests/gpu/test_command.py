"""The command on machines that lack something, and what it writes on one that lacks nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.gpu import run, wheels
from tests.gpu.site import ROOT, Finding, Site

without_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator here")


def command(*arguments: str, program: str = "") -> subprocess.CompletedProcess[str]:
    """``program``: Python before the command, to make the machine another one."""
    code = f"{program}\nimport sys, runpy\nsys.argv = ['tests.gpu', *{list(arguments)!r}]\n"
    code += "runpy.run_module('tests.gpu', run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def hidden(*names: str) -> str:
    """Modules that the machine does not have."""
    found = "importlib.util.find_spec"
    return (
        f"import importlib.util\nreal = {found}\n{found} = lambda name, *a: None if name in {names} else real(name, *a)"
    )


@without_card
def test_without_an_accelerator_it_is_skipped_in_one_line(tmp_path: Path) -> None:
    kept = tmp_path / "gpu.json"
    done = command("--json", str(kept))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"gpu-test: skipped, torch {torch.__version__} finds no accelerator here\n"
    bare = command("--json", str(kept), program=hidden("torch", "transformers"))
    assert (bare.returncode, bare.stdout) == (0, "gpu-test: skipped, there is no accelerator here and no torch\n")
    assert not kept.exists()


@without_card
def test_what_is_missing_is_said_in_one_line() -> None:
    done = command(program=hidden("pydantic", "xxhash"))
    assert done.returncode == 2
    assert done.stdout == "gpu-test: pydantic, xxhash missing; make gpu-test WHEELS=folder installs wheels\n"
    assert command("--wheels", "no-such-folder").stdout == "gpu-test: WHEELS: no-such-folder is not a folder\n"


def wheel(folder: Path, package: str) -> Path:
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr(f"{package}.py", "HERE = 1\n")
        out.writestr(f"{package}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        out.writestr(f"{package}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        out.writestr(f"{package}-1.0.dist-info/RECORD", "")
    return path


def test_wheels_bring_what_is_missing_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("PYTHONPATH", "")
    wheel(tmp_path, "torch")
    wanted = wheel(tmp_path, "nowhere_else")
    assert wheels.wanted(tmp_path) == [wanted]
    assert wheels.install(tmp_path, tmp_path / "site") == ["nowhere-else"]
    assert sorted(it.name for it in (tmp_path / "site").glob("*.py")) == ["nowhere_else.py"]
    child = [sys.executable, "-c", "import nowhere_else; print(nowhere_else.HERE)"]
    assert subprocess.run(child, capture_output=True, text=True, env=os.environ, check=False).stdout == "1\n"
    wheel(tmp_path, "broken").write_bytes(b"no wheel")
    with pytest.raises(OSError, match="WHEELS: "):
        wheels.install(tmp_path, tmp_path / "other")


def test_figures_are_kept_with_device_versions_and_commit(tmp_path: Path) -> None:
    kept = tmp_path / "gpu.json"
    run.write(kept, [Finding("φ", True, "right", {"off": 0.5}, check="copies")], "")
    read = json.loads(kept.read_text(encoding="utf-8"))
    made_by = read["made_by"]
    assert read["checks"] == {
        "copies": {"commit": made_by["commit"], "findings": {"φ": {"right": True, "words": "right", "off": 0.5}}}
    }
    assert made_by["torch"] == torch.__version__ and made_by["transformers"]
    assert len(made_by["devices"]) == torch.cuda.device_count()
    assert made_by["commit"] != ""
    assert run.made_by("abc")["commit"] == "abc"


def test_an_end_by_force_leaves_the_figures_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were written after the last check, and a time limit of the machine left none."""

    def ended(site: Site, only: Sequence[str] | None, limit: float) -> Iterator[Finding]:
        yield Finding("φ", True, f"within {limit:.0f} s", check="copies")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(run, "findings", ended)
    kept = tmp_path / "gpu.json"
    with pytest.raises(KeyboardInterrupt):
        run.on_accelerator(tmp_path, None, kept, "abc", 300)
    found = json.loads(kept.read_text(encoding="utf-8"))["checks"]["copies"]["findings"]
    assert found == {"φ": {"right": True, "words": "within 300 s"}}


def test_a_run_leaves_the_figures_of_checks_that_it_does_not_reach_if_they_are_of_this_machine(tmp_path: Path) -> None:
    """A run that was cut off had destroyed them at its first finding."""
    kept = tmp_path / "gpu.json"

    def checks() -> dict[str, str]:
        found = json.loads(kept.read_text(encoding="utf-8"))["checks"]
        return {name: it["commit"] for name, it in found.items()}

    speed, memory = Finding("bf16", True, "fast", check="speed"), Finding("1M", True, "small", check="memory")
    run.write(kept, [speed, memory], "first")
    run.write(kept, [speed], "second")
    assert checks() == {"memory": "first", "speed": "second"}
    other = json.loads(kept.read_text(encoding="utf-8"))
    other["made_by"]["devices"] = ["another card"]
    kept.write_text(json.dumps(other), encoding="utf-8")
    run.write(kept, [memory], "third")
    assert checks() == {"memory": "third"}


def test_a_check_that_the_limit_leaves_out_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaced what an earlier run had measured by "not begun"."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(run, "CHECKS", ("speed", "memory"))
    kept = tmp_path / "gpu.json"
    run.write(kept, [Finding("bf16", True, "fast", check="speed")], "first")
    assert run.on_accelerator(tmp_path, None, kept, "second", limit=-1.0) == 1
    found = json.loads(kept.read_text(encoding="utf-8"))["checks"]
    assert found == {"speed": {"commit": "first", "findings": {"bf16": {"right": True, "words": "fast"}}}}


def test_the_checks_need_only_what_is_asked_for() -> None:
    """No hivemind, and nothing of the development environment."""
    absent = "\n".join(f"sys.modules[{name!r}] = None" for name in ("greenlet", "hivemind", "hypothesis", "psutil"))
    imports = "\n".join(f"import tests.gpu.checks.{name}" for name in run.CHECKS)
    code = f"import sys\n{absent}\n{imports}\nfrom tests.gpu.site import no_network\nprint(no_network())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("hivemind") and done.returncode == 0, done.stderr
