"""Workers get secret variables, but no file or message shows them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.dump import to_tree, to_yaml
from mindspeed_rlxf.config.load import resolve, resolve_with_notes
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.withheld import Withheld, open_variables, reveal, secret_variables
from mindspeed_rlxf.ops.planning.plan import plan
from mindspeed_rlxf.run.changed_keys import find_changes

CANARY = "canary5f0e"


def variables(config: RunConfig) -> dict[str, Any]:
    found = yaml.safe_load(to_yaml(config))["resource_pool"]["env"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", CANARY),
        ("my-api-key", CANARY),
        ("DB_PASSWORD_2", CANARY),
        ("MYSECRET", CANARY),
        ("REPO_PAT", CANARY),
        ("PROXY", f"http://me:{CANARY}@proxy:3128"),
        ("HEADER", f"Authorization: Bearer {CANARY}"),
        ("VALUE", f"hf_{CANARY}{CANARY}"),
        ("VALUE", f"sk-{CANARY}{CANARY}"),
    ],
)
def test_a_variable_that_looks_like_a_secret_is_used_and_not_written(
    make_tree: Callable[..., Any], name: str, value: str
) -> None:
    tree = make_tree({"resource_pool.env": {name: value, "HCCL_BUFFSIZE": 256}})
    config = resolve(tree, "t")
    env = config.pool_settings.env
    assert variables(config) == {name: "***", "HCCL_BUFFSIZE": "256"}
    assert reveal(env) == {name: value, "HCCL_BUFFSIZE": "256"}
    assert open_variables(env) == {"HCCL_BUFFSIZE": "256"}
    assert secret_variables(env) == {name: value}
    shown = [repr(config), to_yaml(config), plan(config).text, config.model_dump_json()]
    shown += [str(to_tree(config)), pickle.dumps(config).decode("latin-1")]
    assert [text for text in shown if CANARY in text] == []
    assert f"{name}" in shown[2]


def test_ordinary_variables_are_written_as_they_are(make_tree: Callable[..., Any]) -> None:
    given = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "TOKEN_LIMIT": "8"}
    given["PYTHONPATH"] = "/a/b"
    config = resolve(make_tree({"resource_pool.env": given}), "t")
    assert variables(config) == given


def test_notes_about_keys_without_effect_have_no_values(make_tree: Callable[..., Any]) -> None:
    tree = make_tree({"runtime": "local", "resource_pool.env": {"HF_TOKEN": CANARY}})
    tree["resource_pool"]["main"] = 1
    tree["training"] |= {"global_batch_size": 96}
    notes = resolve_with_notes(tree, "t")[1]
    assert any("resource_pool.env={'HF_TOKEN': '***'}" in note for note in notes)
    assert CANARY not in str(notes)


def composed(folder: Path, env: Any, make_tree: Callable[..., Any]) -> RunConfig:
    tree = make_tree({})
    tree["resource_pool"]["env"] = env
    (folder / "mine.yaml").write_text(yaml.safe_dump(tree))
    return resolve(compose("mine", config_dir=folder), "mine")


def test_an_interpolation_stays_one_and_the_written_configuration_starts_the_same_run(
    tmp_path: Path, make_tree: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLXF_PLACE", CANARY)
    monkeypatch.setenv("HF_TOKEN", "literal")
    env = {"PLACE": "${oc.env:RLXF_PLACE}", "URL": "a/${oc.env:RLXF_PLACE}/b", "HF_TOKEN": "other"}
    env |= {"MY_KEY": "${oc.env:NOT_THERE,fallback}"}
    config = composed(tmp_path, env, make_tree)
    assert variables(config) == {
        "PLACE": "${oc.env:RLXF_PLACE}",
        "URL": "a/${oc.env:RLXF_PLACE}/b",
        "HF_TOKEN": "***",
        "MY_KEY": "***",
    }
    found = {"PLACE": CANARY, "URL": f"a/{CANARY}/b", "HF_TOKEN": "other", "MY_KEY": "fallback"}
    assert reveal(config.pool_settings.env) == found
    written = to_yaml(config)
    assert CANARY not in written + plan(config).text
    monkeypatch.setenv("MY_KEY", "from here")
    (tmp_path / "config.yaml").write_text(written)
    again = resolve(compose("config", config_dir=tmp_path), "mine")
    assert find_changes(yaml.safe_load(written), yaml.safe_load(to_yaml(again))) == []
    assert reveal(again.pool_settings.env) == {
        **found, "HF_TOKEN": "literal", "MY_KEY": "from here",
    }  # fmt: skip


def test_a_section_that_is_one_interpolation_is_withheld_whole(
    tmp_path: Path, make_tree: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLXF_ALL", f"{{PLACE: {CANARY}}}")
    config = composed(tmp_path, "${oc.decode:${oc.env:RLXF_ALL}}", make_tree)
    assert variables(config) == {"PLACE": "***"}
    assert reveal(config.pool_settings.env) == {"PLACE": CANARY}


def test_a_mask_without_a_variable_of_that_name_is_refused(
    problems: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (problem,) = problems({"resource_pool.env": {"HF_TOKEN": "***"}})
    assert problem.startswith("resource_pool.env.HF_TOKEN=*** stands for the variable of this")
    assert problem.endswith("; export HF_TOKEN, or give its value")


def test_a_secret_of_a_wrong_type_is_not_shown(problems: Callable[..., list[str]]) -> None:
    (problem,) = problems({"resource_pool.env": {"HF_TOKEN": [CANARY]}})
    assert problem == "resource_pool.env.HF_TOKEN must be text; put it in quotes"


def test_a_resume_compares_no_values_and_shows_none(make_tree: Callable[..., Any]) -> None:
    def tree(value: str) -> dict[str, Any]:
        config = resolve(make_tree({"resource_pool.env": {"HF_TOKEN": value, "A": "b"}}), "t")
        found: dict[str, Any] = yaml.safe_load(to_yaml(config))
        return found

    assert find_changes(tree("one"), tree("two")) == []
    older = tree("one")
    older["resource_pool"]["env"]["HF_TOKEN"] = CANARY  # as versions before this wrote it
    assert find_changes(older, tree("two")) == []
    del older["resource_pool"]["env"]["A"]
    assert CANARY not in str([str(change) for change in find_changes(older, tree("two"))])


def test_a_withheld_value_does_not_travel() -> None:
    made = Withheld("***", CANARY)
    assert copy.deepcopy({"a": made})["a"].secret == CANARY
    assert CANARY.encode() not in pickle.dumps(made) and pickle.loads(pickle.dumps(made)) == "***"
