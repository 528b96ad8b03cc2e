"""Weights of methods that come with ssbench for a fetched model are found by what the model's folder states of
itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specbench_ss import UserError, load_method, load_model
from specbench_ss.models import resolve
from specbench_ss.models.load import outline_of
from specbench_ss.models.resolve import LAB, ORIGIN, bundled_drafters


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that states it is smollm2; it holds the lab's base, and the lab's heads are shipped as that model's."""
    folder = tmp_path / "models" / "small"
    shutil.copytree(LAB / "base", folder)
    (folder / ORIGIN).write_text(json.dumps({"name": "smollm2"}))
    shutil.copytree(LAB / "medusa", tmp_path / "drafters" / "smollm2" / "medusa")
    monkeypatch.setattr(resolve, "DRAFTERS", tmp_path / "drafters")
    return folder


def test_a_fetched_model_has_its_drafters(fetched: Path) -> None:
    target = load_model(str(fetched))
    assert load_method("medusa", target).name == "medusa"
    assert target.bundled_drafter("medusa") == outline_of(str(fetched)).bundled_drafter("medusa")
    assert target.bundled_drafter("ss") is None


def test_a_folder_that_does_not_state_where_it_comes_from_has_none(fetched: Path) -> None:
    (fetched / ORIGIN).unlink()
    with pytest.raises(UserError, match="no weights for model"):
        load_method("medusa", load_model(str(fetched)))


@pytest.mark.parametrize("name", ["../drafters/smollm2", "other", 3, None])
def test_a_name_that_no_package_has_gives_none(fetched: Path, name: object) -> None:
    (fetched / ORIGIN).write_text(json.dumps({"name": name}))
    assert bundled_drafters(str(fetched)) is None


def test_drafters_of_other_weights_are_refused(fetched: Path) -> None:
    config = resolve.DRAFTERS / "smollm2" / "medusa" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_hash": "0" * 16}))
    with pytest.raises(UserError, match="trained for another base"):
        load_method("medusa", load_model(str(fetched)))
