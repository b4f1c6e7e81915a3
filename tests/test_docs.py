"""The snippets of the documentation run as they stand."""

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[1] / "docs" / "trainers").glob("*.md"))


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:The number of training batches",
    "ignore:.*LeafSpec",
    "ignore::UserWarning:torch.utils.data.dataloader",
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_snippet_of_a_page_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) == 1
    exec(compile(snippets[0], str(page), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "budget " in printed
    assert "calls: 4 planned, 0 fallbacks" in printed


def test_there_is_a_page_for_every_trainer() -> None:
    assert [page.stem for page in PAGES] == ["accelerate", "lightning", "own_loop", "transformers"]
