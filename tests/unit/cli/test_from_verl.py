"""`from-verl` prints verl's YAML in our keys, and `--verl-config` starts the same run."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from mindspeed_rlxf.cli import main
from mindspeed_rlxf.cli.train import main as train
from mindspeed_rlxf.compat.verl.table import ACTOR
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "vocab_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
VERL = """
data: {train_files: [a.parquet, b.jsonl], val_files: b.jsonl, train_batch_size: 2,
       max_prompt_length: 8, max_response_length: 8}
actor_rollout_ref:
  model: {path: policy, use_remove_padding: true}
  actor: {ppo_mini_batch_size: 2, use_kl_loss: true, fsdp_config: {dtype: float32}}
  rollout: {name: hf, max_num_batched_tokens: 99, n: 4}
algorithm: {adv_estimator: grpo}
trainer: {n_gpus_per_node: 1, total_epochs: 3, logger: console, project_name: sums}
"""


@pytest.fixture(autouse=True)
def verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    Path("verl.yaml").write_text(VERL)
    Path("policy").mkdir()
    Path("policy/config.json").write_text(json.dumps(LLAMA))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": list("abc")}), "a.parquet")
    Path("b.jsonl").write_text('{"prompt": "d"}\n\n{"prompt": "e"}\n')


def job(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> RunConfig:
    assert train([*arguments, "--cfg", "job"]) == 0
    return resolve(yaml.safe_load(capsys.readouterr().out), "same")


def test_the_translated_yaml_is_the_same_run(capsys):
    assert main(["from-verl", "verl.yaml", "device.kind=cpu"]) == 0
    printed = capsys.readouterr()
    Path("ours.yaml").write_text(printed.out)
    assert "max_num_batched_tokens=99" in printed.err
    ours = resolve(compose("ours", config_dir="."), "same")
    assert ours.training.train_iters == (3 + 2) // 2 * 3
    assert ours.actor_rollout.ppo_mini_batch_size == 8
    assert job(["--verl-config", "verl.yaml", "device.kind=cpu"], capsys) == ours


def test_a_dry_run_of_verls_yaml_prints_the_plan_and_what_has_no_effect(capsys):
    assert train(["--verl-config", "verl.yaml", "device.kind=cpu", "dry_run=true"]) == 2
    printed = capsys.readouterr()
    assert "note: actor_rollout_ref.rollout.max_num_batched_tokens=99" in printed.out
    assert "error: actor_rollout.load" in printed.err  # the folder has no weights


def test_what_is_not_supported_is_an_error_line_at_verls_key(capsys):
    assert main(["from-verl", "verl.yaml", "+trainer.resume_mode=resume_path"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert line.startswith("error: trainer.resume_mode='resume_path' must be one of null, auto")
    assert main(["from-verl", "absent.yaml"]) == 2


@pytest.mark.parametrize(
    "change",
    [
        "trainer.total_epochs=abc",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=abc",
        f"{ACTOR}.optim.lr=-1",
    ],
)
def test_a_wrong_value_is_the_error_line_of_the_run(capsys, change):
    found = []
    for command in (["from-verl"], ["train", "--verl-config"]):
        assert main([*command, "verl.yaml", "device.kind=cpu", change]) == 2
        lines = capsys.readouterr().err.splitlines()
        found.append([line for line in lines if line.startswith("error")])
    assert found[0] == found[1] and len(found[0]) == 1
    assert change.partition("=")[0] in found[0][0]


def test_a_file_that_is_not_there_is_one_error_line(capsys):
    assert main(["from-verl", "nope.yaml"]) == 2
    assert capsys.readouterr().err == "error: nope.yaml: no such file; correct the path\n"
