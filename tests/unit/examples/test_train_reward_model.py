"""A reward model learns to prefer polite responses, and a run that stopped goes on."""

import json
from pathlib import Path
from typing import Any

import full_hh_rlhf
import pytest
import torch
import train_reward_model
from pairs import Pairs
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from mindspeed_rlxf.config.hf_config import parse_architecture, read_hf_config
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.weights.folders import open_weights
from mindspeed_rlxf.weights.hf_folder import shape_problems
from tests import raw_rows
from tests.unit.data.byte_tokenizer import byte_tokenizer
from tests.unit.examples.test_data_preprocess import CHATML


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pairs, in `rm`, and a random language model, in `lm`."""
    folder = tmp_path_factory.mktemp("reward_model")
    raw = raw_rows.write_hh(folder / "raw")
    assert full_hh_rlhf.main(["--input", str(raw), "--output", str(folder)]) == 0
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder / "lm")
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 256}
    LlamaForCausalLM(LlamaConfig(**sizes, **layers)).save_pretrained(folder / "lm")
    return folder


def arguments(base: Path, output: Path, **more: object) -> list[str]:
    files = {name: base / "rm" / f"{name}.parquet" for name in ("train", "test")}
    sizes = {"epochs": 6, "batch-size": 8, "micro-batch-size": 8, "lr": 0.01}
    given = {"model": base / "lm", **files, "output": output, **sizes, **more}
    return [f"--{key}={value}" for key, value in given.items()]


def test_a_trained_reward_model_orders_pairs_and_loads_in_ppo(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rm"
    assert train_reward_model.main(arguments(base, output)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "16 pairs, 16 held out"
    assert lines[1].startswith("step 1/12 loss 0.6931 accuracy 0.000")  # the head starts at zero
    assert json.loads(lines[-1]) == {"held_out": 16, "accuracy": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["rm"]
    architecture = ArchitectureConfig(**parse_architecture(read_hf_config(output)))
    weights = open_weights(output, architecture)
    assert shape_problems(weights, hf_shapes(architecture, Head.SCORE)) == []
    model = LlamaForSequenceClassification.from_pretrained(output)
    tokenizer = load_tokenizer(output)
    better, worse = (scores(model, tokenizer, text) for text in ("Yes, gladly!", "No. Go away."))
    assert better > worse


def scores(model: Any, tokenizer: Any, response: str) -> float:
    """The score of a response that transformers reads at EOS."""
    text = f"<|im_start|>user\nCan you count to 9?<|im_end|>\n<|im_start|>assistant\n{response}"
    ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    return float(model(torch.tensor([ids])).logits)


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train_reward_model.main(arguments(base, whole)) == 0
    step, done = train_reward_model._step, []

    def stop_at_nine(*args: Any) -> Any:
        done.append(1)
        if len(done) == 9:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(train_reward_model, "_step", stop_at_nine)
    command = arguments(base, cut, **{"save-steps": 3})
    with pytest.raises(KeyboardInterrupt):
        train_reward_model.main(command)
    assert not cut.exists()
    monkeypatch.undo()
    assert train_reward_model.main([*command, "--lr=0.02"]) == 2
    assert "error: --lr=0.02 must be 0.01, as in the training that" in capsys.readouterr().err
    assert train_reward_model.main(command) == 0
    assert "resuming after step 6" in capsys.readouterr().out
    ours, theirs = (LlamaForSequenceClassification.from_pretrained(f) for f in (whole, cut))
    for name, value in ours.state_dict().items():
        assert value.equal(theirs.state_dict()[name]), name


def test_micro_batches_and_padding_leave_the_margins_as_they_are(base: Path) -> None:
    tokenizer = load_tokenizer(str(base / "lm"))
    pairs = Pairs(str(base / "rm" / "test.parquet"), tokenizer, 64, 20)
    model = train_reward_model.new_model(str(base / "lm"), tokenizer)
    torch.nn.init.normal_(model.score.weight)
    batch = [pairs[place] for place in range(4)]
    assert len({len(pair.chosen) for pair in batch}) > 1
    together = train_reward_model.compare(model, batch)
    alone = torch.cat([train_reward_model.compare(model, [pair]) for pair in batch])
    torch.testing.assert_close(together, alone)


def test_long_prompts_are_cut_at_the_start_and_responses_at_the_end(base: Path) -> None:
    tokenizer = load_tokenizer(str(base / "lm"))
    pair = Pairs(str(base / "rm" / "test.parquet"), tokenizer, 10, 5)[0]
    assert tokenizer.decode(pair.chosen) == "assistant\nYes, "
    pair = Pairs(str(base / "rm" / "test.parquet"), tokenizer, 10, 13)[0]
    assert tokenizer.decode(pair.rejected) == "assistant\nNo. Go away.<|end_of_text|>"


def test_pairs_that_become_equal_are_dropped_and_counted(base: Path, tmp_path: Path) -> None:
    """The first two responses differ behind the fourth token, the others before."""
    file, tokenizer = tmp_path / "pairs.jsonl", load_tokenizer(str(base / "lm"))
    texts = [("abcde", "abcdf"), ("x", "y"), ("abcd", "abcde"), ("abc", "abcd")]
    rows = [{"prompt": "1+1=", "chosen": one, "rejected": other} for one, other in texts]
    file.write_text("\n".join(map(json.dumps, rows)))
    pairs = Pairs(str(file), tokenizer, 10, 4)
    assert (len(pairs), pairs.num_equal) == (2, 2)
    start = tokenizer("1+1=")["input_ids"]
    read = [tokenizer.decode(ids[len(start) :]) for ids in (pairs[0].chosen, pairs[1].rejected)]
    assert read == ["x<|end_of_text|>", "abcd"]
    file.write_text(json.dumps(rows[0]))
    with pytest.raises(UserError, match="all pairs are equal"):
        Pairs(str(file), tokenizer, 10, 4)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"chosen": "a"}, "pair 1 of {} must have texts chosen and rejected"),
        ({"chosen": "a", "rejected": " "}, "pair 1 of {} must have texts chosen and rejected"),
        ({"chosen": "a", "rejected": "a"}, "pair 1 of {} must have two different responses"),
    ],
)
def test_a_pair_without_two_different_responses_is_refused(
    row: dict[str, str], rule: str, base: Path, tmp_path: Path
) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "p", **row}), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        Pairs(str(file), load_tokenizer(str(base / "lm")), 10, 10)
    assert rule.format(file) in str(caught.value)


def test_wrong_arguments_are_errors_of_one_line(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_reward_model.main(arguments(base, base / "lm")) == 2
    assert "must not exist: an existing folder is taken for a finished" in capsys.readouterr().err
    assert train_reward_model.main(arguments(base, tmp_path / "a", model=tmp_path)) == 2
    assert "error: --model=" in capsys.readouterr().err
    assert train_reward_model.main(arguments(base, tmp_path / "a", train="absent.parquet")) == 2
    assert capsys.readouterr().err.startswith("error: absent.parquet: no such file")
