"""Another checkout in the same process, and what `slattn bench` makes of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import slattn
from slattn import cli
from slattn.commands import bench, beside
from slattn.commands.edge import UsageError

PACKAGE = Path(slattn.__file__).parent


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose reference gives twice the output."""
    made = tmp_path_factory.mktemp("checkouts") / "what-was_before"
    shutil.copytree(PACKAGE, made / "src" / "slattn", ignore=shutil.ignore_patterns("__pycache__"))
    reference = made / "src" / "slattn" / "reference.py"
    reference.write_text(reference.read_text() + "\n\n_true = forward\n\n\ndef forward(*a, **k):\n")
    with reference.open("a") as file:
        file.write("    out, lse = _true(*a, **k)\n    return 2 * out, lse\n")
    return made


def test_it_is_another_package_in_all_it_does(checkout: Path) -> None:
    other = beside.load(str(checkout))
    assert other.__name__ == "slattn_what_was_before"
    q, kv = torch.randn(3, 2, 16), torch.randn(5, 16)
    indices = torch.randint(5, (3, 4), dtype=torch.int32)
    got, want = (package.sparse_attention(q, kv, indices) for package in (other, slattn))
    assert torch.equal(got, 2 * want)
    modules = {name for name in sys.modules if name.partition(".")[0] == other.__name__}
    assert f"{other.__name__}.ops" in modules
    for name in modules:
        for value in vars(sys.modules[name]).values():
            assert str(getattr(value, "__module__", "")).partition(".")[0] != "slattn", (name, value)


def test_bench_measures_both_in_one_run(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "GATE", ("H8-D128-T16-N20-K16",))
    command = ("bench", "--device", "cpu", "--quick", "--shape", "4,16,2,16,8", "--backend", "reference", "--no-peers")
    assert cli.main((*command, "--deterministic", "--beside", str(checkout), "--json", "-")) == 0
    rows = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["rows"]
    whose = ["reference", "reference of slattn_what_was_before"]
    names = {pass_: [row["name"] for row in rows if row["direction"] == pass_] for pass_ in ("fwd", "bwd")}
    assert names["fwd"] == ["matmul 512", *whose]
    assert names["bwd"] == ["matmul 512", *(name + mode for name in whose for mode in ("", ", deterministic"))]
    assert all(row["ms"] > 0 for row in rows)


def test_what_cannot_be_measured_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(("bench", "--device", "cpu", "--beside", str(tmp_path))) == 2
    assert "expected a checkout of slattn, and there is no" in capsys.readouterr().err
    assert cli.main(("bench", "--device", "cpu", "--deterministic", "--pass", "fwd")) == 2
    assert "--deterministic is about the backward, and --pass fwd measures none" in capsys.readouterr().err
    broken = tmp_path / "broken"
    (broken / "src" / "slattn").mkdir(parents=True)
    (broken / "src" / "slattn" / "__init__.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(UsageError, match="cannot be imported: ModuleNotFoundError: No module named 'nothing_of_this"):
        beside.load(str(broken))


def test_two_of_one_name(checkout: Path, tmp_path: Path) -> None:
    again = tmp_path / checkout.name
    shutil.copytree(PACKAGE, again / "src" / "slattn", ignore=shutil.ignore_patterns("__pycache__"))
    first, second = (beside.load(str(path)) for path in (checkout, again))
    assert first.__name__ + "_" == second.__name__
    assert first is beside.load(str(checkout)) is not second


def test_the_copy_goes_with_the_process(checkout: Path) -> None:
    program = f"from slattn.commands import beside; print(beside.load({str(checkout)!r}).__file__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    copy = Path(done.stdout.strip())
    assert copy.parent.name == "slattn_what_was_before"
    assert not copy.exists()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("import slattn\n", "import other as slattn\n"),
        ("    import slattn\n", "    import other as slattn\n"),
        ("from slattn import x\n", "from other import x\n"),
        ("from slattn.ops import y\n", "from other.ops import y\n"),
        ('"tilelang": "slattn.backends.tilelang"', '"tilelang": "other.backends.tilelang"'),
        ('Library("slattn", "DEF")', 'Library("other", "DEF")'),
        ('register_fake(f"slattn::{name}")', 'register_fake(f"other::{name}")'),
        ('call_extern("slattn::add_rows")', 'call_extern("slattn::add_rows")'),
    ],
)
def test_names_in_texts(text: str, wanted: str) -> None:
    assert beside.renamed(text, "other") == wanted
