"""The skip police itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import skips
from tests.plumbing.test_leftovers import run_inner

SKIPS = "import pytest\ndef test_it():\n    pytest.skip('no GPU here')\n"
FILE_SKIPS = "import pytest\npytest.skip('no GPU here', allow_module_level=True)\n"
EXPECTED_FAILURE = "import pytest\n@pytest.mark.xfail\ndef test_it():\n    assert False\n"


@pytest.mark.parametrize(
    ("body", "everything", "code"),
    [(SKIPS, "", 0), (SKIPS, "1", 1), (FILE_SKIPS, "1", 1), (EXPECTED_FAILURE, "1", 0)],
)
def test_an_unlisted_skip_fails_a_full_run(tmp_path: Path, body: str, everything: str, code: int) -> None:
    result = run_inner(tmp_path, body, SERVELITE_TEST_ALL=everything)
    assert result.returncode == code, result.stdout
    assert ("does not allow" in result.stdout) == (code == 1)


def test_the_list_covers_by_node_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("# comment\n\ntests/gpu/* | no GPU\ntests/test_a.py::test_b | needs npm\n")
    allowed = skips.read_allowed(path)
    assert [skip.node for skip in allowed] == ["tests/gpu/*", "tests/test_a.py::test_b"]
    assert allowed[0].covers("tests/gpu/test_x.py::test_y[1]", "Skipped: no GPU here")
    assert not allowed[0].covers("tests/gpu/test_x.py::test_y[1]", "Skipped: no time")
    assert not allowed[1].covers("tests/test_a.py::test_bc", "Skipped: needs npm")


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("tests/test_a.py no bar\n")
    with pytest.raises(ValueError, match=r"list:1: not of the form"):
        skips.read_allowed(path)


def test_the_list_in_the_tree_reads() -> None:
    skips.read_allowed(Path(skips.__file__).with_name("allowed_skips.txt"))
