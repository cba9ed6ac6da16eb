"""Files that a run cannot use are refused with exit 2, one line each; nothing is written."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cli.convert import main as convert_main
from mindspeed_rlxf.cli.train import main
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.problems import MissingFile, UserError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.handlers import MapKeys
from mindspeed_rlxf.data.preprocessing.pipeline import PreprocessOptions, preprocess
from mindspeed_rlxf.data.sampler import PromptSampler
from mindspeed_rlxf.rollout.rollout_engine import ENGINES
from mindspeed_rlxf.trainer.preflight import list_notices, prepare
from mindspeed_rlxf.trainer.validation import without_unused_roles

VOCAB = 12
Problems = Callable[..., list[str]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that a run needs, and its configuration `good.yaml`."""
    folder = tmp_path_factory.mktemp("good")
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=VOCAB, max_position_embeddings=32, rms_norm_eps=1e-5,
        tie_word_embeddings=True, pad_token_id=0, num_labels=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "lm")
    LlamaForSequenceClassification(config).save_pretrained(folder / "scored")
    write_tokenizer(folder / "tokenizer", VOCAB)
    rows = [{"prompt": "1 2", "ground_truth": "3", "data_source": "arithmetic"}] * 4
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    write_config(folder)
    return folder


def write_tokenizer(folder: Path, size: int) -> None:
    words = ["<pad>", "<eos>", *(str(i) for i in range(size - 2))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)


def write_config(folder: Path) -> None:
    small = {
        "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 2,
        "num_query_groups": 1, "vocab_size": VOCAB, "max_position_embeddings": 32,
    }  # fmt: skip
    lm = str(folder / "lm")
    tree = {
        "model": {"small": small},
        "training": {
            "model": "small", "train_iters": 1, "global_batch_size": 2, "seq_length": 16,
            "tokenizer_name_or_path": str(folder / "tokenizer"), "output_dir": str(folder / "run"),
        },
        "actor_rollout": {
            "load": lm, "max_prompt_length": 8, "ppo_mini_batch_size": 2, "do_sample": True,
        },
        "ref": {"load": lm},
        "critic": {"load": lm, "critic_mini_batch_size": 2},
        "reward": {"load": str(folder / "scored")},
        "data": {"train_files": str(folder / "train.jsonl")},
        "device": {"kind": "cpu"},
        "resource_pool": {"actor_rollout": 1, "ref": 1, "critic": 1, "reward": 1},
    }  # fmt: skip
    (folder / "good.yaml").write_text(json.dumps(tree), encoding="utf-8")


@pytest.fixture
def problems(good: Path, capsys: pytest.CaptureFixture[str]) -> Problems:
    """Start a run with overrides that is refused; return its `error:` lines.

    Asserts exit 2, no traceback, and that nothing is written.
    """

    def start(*overrides: str) -> list[str]:
        before = sorted(good.rglob("*"))
        capsys.readouterr()
        status = main(["--config-dir", str(good), "--config-name", "good", *overrides])
        lines = capsys.readouterr().err.strip().splitlines()
        assert status == 2, lines
        assert all(line.startswith("error: ") for line in lines), lines
        assert sorted(good.rglob("*")) == before
        return lines

    return start


def load_config(good: Path, *overrides: str) -> RunConfig:
    return resolve(compose("good", list(overrides), str(good)), "good")


def test_the_good_configuration_has_no_problem(good):
    before = sorted(good.rglob("*"))
    assert main(["--config-dir", str(good), "--config-name", "good", "dry_run=true"]) == 0
    assert sorted(good.rglob("*")) == before


@pytest.mark.parametrize(("key", "rule"), [
    ("actor_rollout.load", "config.json is missing"), ("reward.load", "config.json is missing"),
    ("training.tokenizer_name_or_path", "tokenizer"), ("data.train_files", "no such file"),
    ("data.train_files=[] data.data_path", "must be the --output-prefix of an indexed data set"),
])  # fmt: skip
def test_missing_files_are_named(problems, key, rule):
    (line,) = problems(*f"{key}=./absent.jsonl".split())
    assert "absent.jsonl" in line and rule in line


@pytest.mark.parametrize("tokenizer", ["training.tokenizer_name_or_path=./absent", "dry_run=true"])
def test_what_is_only_missing_can_be_told_from_what_is_broken(good, tokenizer):
    """A plan for another machine passes over it."""
    keys = "actor_rollout.load", "ref.load", "critic.load", "reward.load"
    missing = [f"{key}=./absent" for key in keys]
    with pytest.raises(UserError) as error:
        prepare(load_config(good, *missing, tokenizer, "data.train_files=./absent.jsonl"))
    assert len(error.value.problems) >= 5
    assert all(isinstance(problem, MissingFile) for problem in error.value.problems)


@pytest.mark.parametrize(
    "first", ["training.tokenizer_name_or_path=./no1", "+training.plugins=no1"]
)
def test_all_missing_files_are_named_at_once(problems, first):
    """Also where one is missing that is read before the others."""
    lines = problems(first, "ref.load=./no2", "data.train_files=[./no3.jsonl, ./no4.jsonl]")
    named = ["".join(n for n in "1234" if f"no{n}" in line) for line in lines]
    assert sorted(named) == ["1", "2", "3", "4"]
    if "tokenizer" in first:
        indexed = problems(first, "data.train_files=[]", "data.data_path=./no5")
        assert sum("no5" in line for line in indexed) == 1


def test_stop_tokens_of_indexed_data_sets_end_responses(good, tmp_path):
    """1 is the tokenizer's EOS, 2 the model's; each data set brings one, that of validation too."""
    files, keys = (str(good / "train.jsonl"),), MapKeys(prompt="prompt")
    for name, stop in (("train", 5), ("val", 7)):
        places = str(tmp_path / name), str(good / "tokenizer")
        preprocess(PreprocessOptions(files, *places, map_keys=keys))
        sidecar = tmp_path / f"{name}_packed_meta.json"
        meta = {**json.loads(sidecar.read_text()), "stop_token_ids": [stop]}
        sidecar.write_text(json.dumps(meta))
    prefixes = [f"data.data_path={tmp_path}/train", f"data.val_data_path={tmp_path}/val"]
    prepared = prepare(load_config(good, "data.train_files=[]", *prefixes))
    assert prepared.eos_token_ids == (1, 2, 5, 7)
    prompts = (prepared.train_prompts, prepared.val_prompts)
    assert [[p.token_ids.tolist() for p in part] for part in prompts] == [[[3, 4]] * 4] * 2
    labels = {(p.ground_truth, p.data_source) for part in prompts for p in part}
    assert labels == {("3", "arithmetic")}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "at least one"),
        ('{"ground_truth": "3", "data_source": "arithmetic"}', "prompt"),
        ('{"prompt": 7, "ground_truth": "3", "data_source": "arithmetic"}', "prompt"),
        ('{"prompt": "1", "ground_truth": "3", "data_source": "chess"}', "chess"),
        ('{"prompt": "1" "ground_truth"', "JSON"),
    ],
    ids=["empty file", "no prompt", "number as prompt", "unknown source", "broken line"],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, problems, text, rule):
    file = tmp_path / "rows.jsonl"
    file.write_text(text, encoding="utf-8")
    reward = ["reward.kind=rule"] if "chess" in text else []
    (line,) = problems(f"data.train_files={file}", *reward)
    assert rule in line


@pytest.fixture
def function(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text("def score(prompt, response, ground_truth, extra_info):\n    return 1.0")
    return f"+reward.functions=[{{function: '{file}:score'}}]"


@pytest.mark.parametrize("file", ["train_files", "val_files"])
def test_a_named_column_of_ground_truths_is_in_every_file(good, tmp_path, function, file):
    """Functions would score against empty ones."""
    (tmp_path / "bare.jsonl").write_text(
        '{"prompt": "1 2", "answer": "3", "data_source": "arithmetic"}\n', encoding="utf-8"
    )
    changed = f"+data.{file}={tmp_path / 'bare.jsonl'}".replace("+data.train", "data.train")
    with pytest.raises(UserError) as error:
        prepare(load_config(good, function, changed, "+data.ground_truth_key=anser"))
    hints = {problem.key: problem.remedy for problem in error.value.problems}
    assert hints["data.ground_truth_key"].startswith("did you mean ")


def test_ground_truths_that_nobody_named_may_be_absent(good, tmp_path, function, caplog):
    (tmp_path / "bare.jsonl").write_text('{"prompt": "1 2", "data_source": "arithmetic"}\n' * 4)
    prepare(load_config(good, f"data.train_files={tmp_path / 'bare.jsonl'}", function))
    assert "no row has data.ground_truth_key" in caplog.text
    caplog.clear()
    prepare(load_config(good, function))
    assert "no row has data.ground_truth_key" not in caplog.text


def test_validation_is_scored_by_rules_unless_a_model_is_asked_for(tmp_path, good, problems):
    """The training prompts have no rule either: they are scored by the reward model."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1", "ground_truth": "3", "data_source": "chess"}')
    prompts = [f"data.train_files={file}", f"data.val_files={file}"]
    (line,) = problems(*prompts)
    assert "data source 'chess' (1 rows) must have a rule" in line
    assert line.endswith("or use validation.reward=model")
    found = prepare(load_config(good, *prompts, "validation.reward=model"))
    assert [prompt.data_source for prompt in found.val_prompts] == ["chess"]


def test_a_row_for_the_model_needs_a_prompt_and_a_labelled_one_its_rule(tmp_path, good, problems):
    file = tmp_path / "rows.jsonl"
    plain = '{"prompt": "1"}\n{"prompt": "2", "reward_model": {"style": "model"}}\n'
    rule = '{"prompt": "3", "data_source": "mine", "reward_model": {"style": "STYLE"}}'
    file.write_text(plain)
    keys = [f"data.train_files={file}", "data.extra_columns=[]", "+reward.rules={mine: gsm8k}"]
    found = prepare(load_config(good, *keys))
    assert len(found.train_prompts) == 2 and not found.scores_in_processes
    file.write_text(plain + rule.replace("STYLE", "ruler"))
    assert "reward_model.style must be rule or model" in problems(*keys)[0]
    file.write_text(plain + rule.replace("STYLE", "rule"))
    assert "data source 'mine' (1 rows) must have ground truths" in problems(*keys)[0]
    file.write_text(plain + rule.replace("STYLE", "rule").replace("3", '3", "ground_truth": "1', 1))
    assert prepare(load_config(good, *keys)).scores_in_processes


def test_rows_need_a_data_source_where_it_chooses_what_scores(tmp_path, good, problems):
    (tmp_path / "mine.py").write_text(
        "def score(prompt, response, ground_truth, extra_info):\n    1"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}')
    keys = [
        "reward={kind: rule}",
        "~resource_pool.reward",
        f"data.train_files={tmp_path}/rows.jsonl",
    ]
    part = f"function: '{tmp_path}/mine.py:score'"
    config = load_config(good, *keys, f"+reward.functions=[{{{part}}}]")
    assert [prompt.data_source for prompt in prepare(config).train_prompts] == ["unnamed"]
    for parts in (f"{{{part}, data_sources: [a]}}", f"{{{part}}}, {{function: rule, name: b}}"):
        (line,) = problems(*keys, f"+reward.functions=[{parts}]")
        assert "must name its data source" in line


def test_functions_beside_a_model_score_every_data_source_of_validation(tmp_path, good, problems):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1", "ground_truth": "3", "data_source": source} for source in "ab"]
    file.write_text("\n".join(map(json.dumps, rows)))
    function = "+reward.functions=[{function: gsm8k, data_sources: [a]}]"
    keys = [f"data.train_files={file}", f"data.val_files={file}", function]
    (line,) = problems(*keys)
    assert line.startswith("error: data source 'b' of the validation prompts must have a function")
    assert line.endswith("or use validation.reward=model")
    prepare(load_config(good, *keys, "validation.reward=model"))


def test_validation_alone_reads_no_critic_and_no_reference(good):
    keys = [f"data.val_files={good / 'train.jsonl'}", "validation.reward=model"]
    critic = f"critic.load={good / 'lm'} has no score head: it starts untrained"
    assert critic in prepare(load_config(good, *keys)).notices
    (checkpoint := good / "run" / "checkpoints" / "iter_0000001").mkdir(parents=True)
    assert critic not in list_notices(load_config(good, *keys)), "the checkpoint's head is loaded"
    shutil.rmtree(checkpoint.parents[1])
    gone = ["ref.load=./gone", "critic.load=./gone", "validation.only=true"]
    config = load_config(good, *keys, *gone)
    assert not any("critic" in notice for notice in prepare(config).notices)
    built = without_unused_roles(config)
    assert built.roles == [Role.ACTOR_ROLLOUT, Role.REWARD] and built.critic is None
    assert {*built.resource_pool} == {*built.placement.values()} < {*config.resource_pool}


def test_the_best_metric_is_of_a_data_source_that_there_is(good, problems):
    val_files, metric = f"data.val_files={good / 'train.jsonl'}", "validation.best_metric"
    (line,) = problems(val_files, f"{metric}=val/arithmetics/score")
    assert line == (
        f"error: {metric}=val/arithmetics/score must be a metric of a data source of the "
        "validation prompts (arithmetic); use val/arithmetic/score"
    )
    right = load_config(good, val_files, f"{metric}=val/arithmetic/pass@1")
    assert len(prepare(right).val_prompts) == 4


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path, problems):
    write_tokenizer(tmp_path, VOCAB + 3)
    (line,) = problems(f"training.tokenizer_name_or_path={tmp_path}")
    assert f"vocab_size={VOCAB}" in line and str(VOCAB + 2) in line


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def change_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def transpose_one(file: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    change_tensors(file, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))


def drop_one(file: Path) -> None:
    change_tensors(file, lambda tensors: tensors.pop("model.norm.weight"))


def quantize_one(file: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    change_tensors(file, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))


def add_output_layer(file: Path) -> None:
    name = "model.embed_tokens.weight"
    change_tensors(file, lambda t: t.update({"lm_head.weight": t[name].roll(1, 0).clone()}))


def add_layer(file: Path) -> None:
    config = file.with_name("config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 3}))


def test_a_megatron_folder_of_another_tool_uses_the_tokenizers_config(good, tmp_path, problems):
    """Such a folder has no config.json; stop tokens come from the folder that has it."""
    shutil.copytree(good / "tokenizer", tmp_path / "tokenizer")
    convert = [str(good / "lm"), str(tmp_path / "mg"), "--to", "mg"]
    assert convert_main(convert) == 0
    for file in ("config.json", "generation_config.json"):
        (tmp_path / "mg" / file).unlink()
    words = [f"{role}.load={tmp_path / 'mg'}" for role in ("actor_rollout", "ref", "critic")]
    words.append(f"training.tokenizer_name_or_path={tmp_path / 'tokenizer'}")
    found = problems(*words)
    assert len(found) == 3
    assert all("config.json is neither in it nor in training" in line for line in found)
    shutil.copy(good / "lm" / "config.json", tmp_path / "tokenizer")
    generation = tmp_path / "tokenizer" / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert prepare(load_config(good, *words)).eos_token_ids == (1, 7)


@pytest.mark.parametrize(("damage", "rule"), [
    (truncate, "damaged or truncated"),
    (transpose_one, "model.layers.1.mlp.down_proj.weight is [24, 16], the model needs"),
    (drop_one, "model.norm.weight is missing"), (Path.unlink, "holds neither"),
    (quantize_one, "down_proj.weight is int8"), (add_output_layer, "tie_word_embeddings"),
    (add_layer, "num_layers: 2, 3"),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_weights_that_do_not_fit_are_refused(good, tmp_path, problems, damage, rule):
    folder = shutil.copytree(good / "lm", tmp_path / "lm")
    damage(folder / "model.safetensors")
    (line,) = problems(f"ref.load={folder}")
    assert line.startswith(f"error: ref.load={folder}: ") and rule in line


def test_a_reward_model_needs_its_score_head_and_a_critic_does_not(good, problems):
    (line,) = problems(f"reward.load={good / 'lm'}")
    assert "score.weight is missing" in line


def test_an_eos_id_beyond_the_vocabulary_is_refused(good, tmp_path, problems):
    folder = shutil.copytree(good / "lm", tmp_path / "lm")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 99]}))
    (line,) = problems(f"actor_rollout.load={folder}")
    assert "EOS id 99" in line


def test_an_unknown_or_unsuitable_rollout_engine_is_refused(problems, monkeypatch, tmp_path):
    (line,) = problems("rollout.engine=nativ")
    assert line.startswith(
        "error: rollout.engine=nativ must be one of native, vllm, transformers; use"
    )
    monkeypatch.setitem(ENGINES, "other", lambda *_: None)
    split = ["num_gpus_for_train=1", "num_gpus_for_infer=1"]
    words = [*(f"actor_rollout.{word}" for word in split), "resource_pool.actor_rollout=2"]
    (line,) = problems("rollout.engine=other", *words)
    assert line.startswith("error: rollout.engine=other cannot generate on ranks of its own")
    lines = problems("rollout.engine=transformers", f"actor_rollout.load={tmp_path}")
    assert any(line.startswith("error: rollout.engine=transformers needs") for line in lines)
    (line,) = problems("rollout.engine=vllm", "+rollout.vllm.python=/nowhere/python")
    assert line.startswith("error: rollout.vllm.python=/nowhere/python must have vLLM; run")


CODE = ("reward={kind: rule, rules: {arithmetic: code}}", "~resource_pool.reward")


def write_cases(good: Path, *truths: str) -> str:
    rows = [{"prompt": "1 2", "ground_truth": t, "data_source": "arithmetic"} for t in truths]
    (good / "cases.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return f"data.train_files={good}/cases.jsonl"


def test_a_run_with_programs_needs_bubblewrap_unless_it_is_unsafe(good, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    cases = write_cases(good, *['{"inputs": [""], "outputs": ["3"]}'] * 2)
    config = load_config(good, *CODE, cases, "+reward.sandbox.unsafe=true")
    (line,) = [notice for notice in prepare(config).notices if notice.startswith("sandbox: ")]
    assert "WITHOUT isolation" in line
    with pytest.raises(UserError, match=r"not installed.*reward\.sandbox\.unsafe=true"):
        prepare(load_config(good, *CODE, cases))


def test_rows_without_test_cases_are_refused(good):
    cases = write_cases(good, '{"inputs": [""], "outputs": ["3"]}', "3")
    with pytest.raises(UserError, match=r"test cases: Input should be an object"):
        prepare(load_config(good, *CODE, cases, "+reward.sandbox.unsafe=true"))


def test_a_resumed_run_replaces_no_weights_of_others(good):
    """Its own exports it may replace."""
    folder = good / "weights"
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "model.safetensors").write_text("of another run")
    run = RunDirectory.create(load_config(good))
    run.metrics.write_text("{}\n")
    run.unlock()
    with pytest.raises(UserError, match=r"actor_rollout\.save=.* must not hold weights"):
        prepare(load_config(good, f"actor_rollout.save={folder}"))
    RunDirectory.create(load_config(good, f"actor_rollout.save={folder}")).unlock()
    assert prepare(load_config(good, f"actor_rollout.save={folder}")).eos_token_ids
    # As folder of both roles it is divided.
    both = f"actor_rollout.save={folder}", f"critic.save={folder}"
    (folder / "actor" / "hf").mkdir(parents=True)
    (folder / "actor" / "hf" / "model.safetensors").write_text("of another run")
    with pytest.raises(UserError, match=r"actor_rollout\.save=.* must not hold weights"):
        prepare(load_config(good, *both))


def test_responses_to_other_prompts_are_refused(good, tmp_path, problems):
    rows = [{"prompt": f"{i} 1", "ground_truth": "3", "data_source": "a"} for i in range(4)]
    data, file = tmp_path / "train.jsonl", tmp_path / "given.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    words = [f"data.train_files={data}", "training.train_iters=3"]
    words.append(f"training.output_dir={tmp_path / 'run'}")
    words.append(f"+actor_rollout.fixed_responses={file}")
    order = PromptSampler(4, 2, 1234, shuffle=True)
    drawn = [i for _ in range(3) for i in order.next_batch()]

    def write(indices: list[int]) -> None:
        lines = [{"prompt_ids": [i + 2, 3], "response_ids": [4, 1]} for i in indices]
        file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")

    write(drawn)
    assert prepare(load_config(good, *words)).fixed_responses
    write([*drawn[:4], drawn[5], drawn[4]])
    (line,) = problems(*words)
    assert "the response to sample 4 must answer its prompt" in line
