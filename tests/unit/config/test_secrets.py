"""Workers and servers get secrets, but no file or message shows them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_rlxf.checkpoint.directory import find_changes
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.keys import to_yaml
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.secrets import reveal
from mindspeed_rlxf.ops.planning.plan import plan

CANARY = "canary5f0e"


def dumped(config: RunConfig) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(to_yaml(config))
    return found


def variables(config: RunConfig) -> Any:
    return dumped(config)["resource_pool"]["env"]


def composed(folder: Path, make_tree: Callable[..., Any], changes: dict[str, Any]) -> RunConfig:
    tree = make_tree({})
    for section, keys in changes.items():
        tree.setdefault(section, {}).update(keys)
    (folder / "mine.yaml").write_text(yaml.safe_dump(tree))
    return resolve(compose("mine", config_dir=folder), "mine")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", CANARY, "***"),
        ("my-api-key", CANARY, "***"),
        ("DB_PASSWORD_2", CANARY, "***"),
        ("MYSECRET", CANARY, "***"),
        ("REPO_PAT", CANARY, "***"),
        ("PROXY", f"http://me:{CANARY}@proxy:3128", "http://***@proxy:3128"),
    ],
)
def test_a_variable_that_is_a_secret_by_its_name_is_used_and_not_written(
    make_tree, name, value, shown
):
    config = resolve(make_tree({"resource_pool.env": {name: value, "HCCL_BUFFSIZE": 256}}), "t")
    env = config.pool_settings.env
    assert variables(config) == {name: shown, "HCCL_BUFFSIZE": "256"}
    assert reveal(env) == {name: value, "HCCL_BUFFSIZE": "256"}
    assert (env[name].is_open, env["HCCL_BUFFSIZE"].is_open) == (False, True)
    assert CANARY not in repr(config) + plan(config).text + config.model_dump_json()


def test_an_interpolation_stays_one_and_the_written_configuration_starts_the_same_run(
    tmp_path, make_tree, monkeypatch
):
    monkeypatch.setenv("RLXF_PLACE", CANARY)
    env = {"PLACE": "${oc.env:RLXF_PLACE}", "URL": "a/${oc.env:RLXF_PLACE}/b"}
    server = {"url": "http://judge/?key=${oc.env:RLXF_PLACE}", "name": "judge"}
    server["headers"] = {"Authorization": "Bearer ${oc.env:RLXF_PLACE}"}  # type: ignore[assignment]
    reward = {"kind": "rule", "functions": [server]}
    changes: dict[str, Any] = {"resource_pool": {"env": env}, "reward": reward}
    config = composed(tmp_path, make_tree, changes)
    written = to_yaml(config)
    assert variables(config) == env
    (part,) = dumped(config)["reward"]["functions"]
    assert {name: part[name] for name in server} == server
    assert CANARY not in written + plan(config).text + repr(config)
    (tmp_path / "config.yaml").write_text(written)
    again = resolve(compose("config", config_dir=tmp_path), "mine")
    assert find_changes(yaml.safe_load(written), dumped(again)) == []
    assert again.reward.scoring_functions == config.reward.scoring_functions
    assert reveal(again.reward.scoring_functions[0].headers) == {
        "Authorization": f"Bearer {CANARY}"
    }
    assert reveal(again.pool_settings.env) == {"PLACE": CANARY, "URL": f"a/{CANARY}/b"}


def test_a_default_of_an_interpolation_and_a_whole_section_are_masked(
    tmp_path, make_tree, monkeypatch
):
    monkeypatch.setenv("RLXF_ALL", f"{{PLACE: {CANARY}}}")
    changes = {"resource_pool": {"env": {"A": f"${{oc.env:NOT_THERE,{CANARY}}}"}}}
    config = composed(tmp_path, make_tree, changes)
    assert (variables(config), reveal(config.pool_settings.env)) == ({"A": "***"}, {"A": CANARY})
    changes = {"resource_pool": {"env": "${oc.decode:${oc.env:RLXF_ALL}}"}}  # type: ignore[dict-item]
    config = composed(tmp_path, make_tree, changes)
    assert variables(config) == {"PLACE": "***"}
    assert reveal(config.pool_settings.env) == {"PLACE": CANARY}


def test_a_literal_secret_is_masked_and_asked_for_again(make_tree, problems):
    server = {"url": f"http://me:{CANARY}@judge/?key={CANARY}", "headers": {"X-Key": CANARY}}
    config = resolve(make_tree({"reward": {"kind": "rule", "functions": [server]}}), "t")
    (part,) = dumped(config)["reward"]["functions"]
    assert (part["url"], part["headers"]) == ("http://***@judge/?***", {"X-Key": "***"})
    assert CANARY not in repr(config) + plan(config).text
    again = {"url": part["url"], "headers": part["headers"]}
    found = problems({"reward": {"kind": "rule", "functions": [again]}})
    assert len(found) == 2 and all("***" in each and "oc.env" in each for each in found)
    (problem,) = problems({"resource_pool.env": {"HF_TOKEN": "***"}})
    assert problem.startswith("resource_pool.env.HF_TOKEN=***")


def test_a_resume_compares_no_secrets_and_lets_servers_move(make_tree):
    def tree(value: str, host: str = "judge") -> dict[str, Any]:
        server = {"url": f"http://me:{value}@{host}/", "headers": {"X-Key": value}}
        reward = {"kind": "rule", "functions": [server]}
        env = {"HF_TOKEN": value, "A": "b"}
        return dumped(resolve(make_tree({"resource_pool.env": env, "reward": reward}), "t"))

    assert find_changes(tree("one"), tree("two")) == []
    (change,) = find_changes(tree(CANARY), tree("two", "other"))
    assert (change.key, change.rule) == ("reward.functions", "free")
    assert CANARY not in str(change)
