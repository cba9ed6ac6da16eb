"""A sequence classifier of Hugging Face scores; functions may score beside a model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tokenizers import processors
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    GPTNeoXConfig,
    LlamaConfig,
    RobertaConfig,
)

from mindspeed_rlxf.config.enums import RewardKind
from mindspeed_rlxf.config.schema import RewardConfig, RolloutConfig
from mindspeed_rlxf.data.agent_record import AgentFailure, AgentRecord
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts, RuleScores, Scores
from mindspeed_rlxf.rewards import classifier as classifiers
from mindspeed_rlxf.rewards.classifier import Classifier, check_classifier
from mindspeed_rlxf.roles import reward as module
from mindspeed_rlxf.roles.reports import FailedSample, ScoreReport
from mindspeed_rlxf.roles.reward import RewardRole
from tests.rows import made_rollouts
from tests.unit.data.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
SMALL = {
    "vocab_size": len(TOKENIZER), "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32,
    "num_labels": 1,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig,
    "bert": BertConfig,
    "gpt_neox": GPTNeoXConfig,
    "roberta": RobertaConfig,
}


def saved(folder: Path, kind: str, **changes: Any) -> Path:
    torch.manual_seed(3)
    config = CONFIGS[kind](**{**SMALL, **changes})
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifiers.device, "current_device", lambda: torch.device("cpu"))


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt_neox"])
def test_scores_are_those_of_the_model_for_each_text_alone(tmp_path, kind):
    folder = saved(tmp_path / kind, kind)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = ["1+1=2", "1+1=", "12+345=357, I think", "x" * 100, "7"]
    expected = []
    for text in texts:
        ids = TOKENIZER(text)["input_ids"][-32:]  # the end of a text that is too long
        with torch.no_grad():
            expected.append(model(input_ids=torch.tensor([ids])).logits.item())
    assert check_classifier(str(folder)) == []
    for batch_size in (1, 2, 5):
        found = Classifier(str(folder), TOKENIZER, batch_size, bf16=False).score(texts)
        assert found == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == len(texts), "else an order would not be seen"


@pytest.mark.parametrize(("limit", "tokens"), [(20, 20), (10**30, 30)], ids=["own", "model's"])
def test_a_truncated_text_keeps_special_tokens_and_positions(tmp_path, limit, tokens):
    """BERT's score is that of its first token; RoBERTa's first position is number 2."""
    own = byte_tokenizer()
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="a $A b", special_tokens=[("a", 5), ("b", 6)]
    )
    own.model_max_length = limit
    folder = saved(tmp_path / "roberta", "roberta", pad_token_id=1)
    own.save_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    (long,) = [own("x1" * 50, add_special_tokens=False)["input_ids"][2 - tokens :]]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[5, *long, 6]])).logits.item()
    found = Classifier(str(folder), TOKENIZER, 2, bf16=False).score(["x1" * 50, "1"])
    assert found[0] == pytest.approx(expected, abs=1e-5) and found[0] != found[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "must name a model ...ForSequenceClassification"),
        ({"id2label": {"0": "bad", "1": "good"}}, "must have one label, it has 2"),
        ({"auto_map": {"AutoConfig": "x.Y"}}, "names code of its own"),
    ],
)
def test_a_folder_that_cannot_score_is_an_error(tmp_path, changes, said):
    folder = saved(tmp_path / "model", "llama")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    (problem,) = check_classifier(str(folder))
    assert said in str(problem) and str(problem).startswith("reward.load=")


def test_a_quantized_classifier_is_an_error(tmp_path):
    from safetensors.torch import load_file, save_file

    file = saved(tmp_path / "model", "llama") / "model.safetensors"
    weights, name = load_file(file), "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name].to(torch.int8)}, file, metadata={"format": "pt"})
    assert "quantized" in str(check_classifier(str(file.parent))[0])


def test_pickled_and_missing_weights_are_errors(tmp_path):
    folder = saved(tmp_path / "model", "llama")
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks weights"):
        Classifier(str(folder), TOKENIZER, 1, bf16=False)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "must be safetensors" in str(check_classifier(str(folder))[0])
    assert "config.json is missing" in str(check_classifier(str(tmp_path / "none"))[0])
    assert "must name" in str(check_classifier(None)[0])


def role_of(monkeypatch: pytest.MonkeyPatch, agent: str | None = None, **keys: Any) -> RewardRole:
    monkeypatch.setattr(module, "load_tokenizer", lambda folder: TOKENIZER)
    reward = RewardConfig.model_construct(**{**dict(RewardConfig(kind="rule")), **keys})
    training = SimpleNamespace(tokenizer_name_or_path="nowhere")
    actor = SimpleNamespace(stop_strings=())
    config: Any = SimpleNamespace(
        reward=reward,
        training=training,
        actor_rollout=actor,
        verifiers=[],
        rollout=RolloutConfig(agent=agent),
    )
    return RewardRole(config)


EOS = "<|end_of_text|>"  # of the policy's tokenizer


def rollouts(
    questions: tuple[str, str] = ("1+", "1"),
    answers: tuple[str, str] = ("2", "+3"),
    messages: list[list[dict[str, Any]]] | None = None,
) -> Rollouts:
    """Two samples: `1+` answered by `2`, and `1` by `+3`; those with an EOS have ended."""
    prompts, responses = (
        [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts]
        for texts in (questions, answers)
    )
    width, height = (max(map(len, rows)) for rows in (responses, prompts))
    return made_rollouts(
        prompt_ids=torch.tensor([p + [0] * (height - len(p)) for p in prompts]),
        prompt_lengths=torch.tensor([len(p) for p in prompts]),
        response_ids=torch.tensor([a + [0] * (width - len(a)) for a in responses]),
        response_mask=torch.tensor([[i < len(a) for i in range(width)] for a in responses]),
        has_eos=torch.tensor([answer.endswith(EOS) for answer in answers]),
        messages=messages or [],
    )


def ids_read(monkeypatch: pytest.MonkeyPatch, folder: Path, rows: Rollouts) -> list[list[int]]:
    """The ids of each row that the folder's classifier computes."""
    role = role_of(monkeypatch, kind=RewardKind.HUGGING_FACE, load=str(folder))
    with patch.object(role.classifier, "score_tokens", return_value=[0.5, -1.0]) as score:
        output = role.score(rows)
    assert output.report == ScoreReport([0.5, -1.0])
    assert isinstance(output.rows, Scores) and output.rows.scores.tolist() == [0.5, -1.0]
    (ids,) = score.call_args.args
    return ids


def other_tokenizer(folder: Path, template: str | None = None) -> Any:
    """Write a tokenizer whose ids differ from the policy's, and which adds `<a>`."""
    own = byte_tokenizer(["<p>", "<a>", "<z>", "<u>", "<b>"], "<a> $A", "<z>")
    own.chat_template = template
    own.save_pretrained(folder)
    return own


def test_the_classifier_reads_the_policys_ids_where_both_have_its_tokenizer(monkeypatch, tmp_path):
    folder = saved(tmp_path / "llama", "llama")
    chat = "<|im_start|>1+<|im_end|>"
    found = ids_read(monkeypatch, folder, rollouts((chat, "1"), ("2" + EOS, "+3")))
    assert found == [TOKENIZER(text)["input_ids"] for text in (f"{chat}2{EOS}", "1+3")]
    TOKENIZER.save_pretrained(folder)  # a copy in the folder is the same tokenizer
    assert ids_read(monkeypatch, folder, rollouts((chat, "1"), ("2" + EOS, "+3"))) == found
    found = ids_read(monkeypatch, folder, rollouts(("x" * 30, "<s>" + "x" * 40), ("2" + EOS, "3")))
    assert found[0] == TOKENIZER("x" * 30 + f"2{EOS}")["input_ids"]
    assert len(found[1]) == 32 and TOKENIZER.decode(found[1]) == "x" * 31 + "3"


def test_a_text_has_the_classifiers_special_tokens_and_its_eos_where_it_ended(
    monkeypatch, tmp_path
):
    folder = saved(tmp_path / "llama", "llama")
    own = other_tokenizer(folder)
    found = ids_read(monkeypatch, folder, rollouts(("<s>1+", "1"), ("2" + EOS, "+3")))
    assert list(map(own.decode, found)) == ["<a>1+2<z>", "<a>1+3"]
    found = ids_read(monkeypatch, folder, rollouts(("x" * 40, "1"), ("2" + EOS, "+3")))
    assert own.decode(found[0]) == "<a>" + "x" * 29 + "2<z>", "no longer than the model takes"


@pytest.mark.parametrize(("closing", "end"), [("<b>~", "<b>~"), ("~", "~<z>")])
def test_a_chat_is_read_through_the_classifiers_template(monkeypatch, tmp_path, closing, end):
    """It is closed, by its own mark or by EOS, where the response has ended."""
    folder = saved(tmp_path / "llama", "llama")
    template = "{% for m in messages %}<u>{{ m.role }}:{{ m.content }}" + closing + "{% endfor %}"
    own = other_tokenizer(folder, template)
    chats = [[{"role": "user", "content": text}] for text in ("1+<z>", "1")]
    rows = rollouts(("<|im_start|>1+<z>", "1"), ("2" + EOS, "+3"), chats)
    found = ids_read(monkeypatch, folder, rows)
    whole = f"<u>user:1+<z>{closing}<u>assistant:2{end}"
    assert list(map(own.decode, found)) == [whole, f"<u>user:1{closing}<u>assistant:+3"]
    mark = own.convert_tokens_to_ids("<z>")
    assert found[0].count(mark) == end.count("<z>"), "what a user spells is text"


@pytest.mark.parametrize("kind", [RewardKind.HUGGING_FACE, RewardKind.RULE])
def test_a_conversation_whose_agent_failed_is_not_scored_by_whatever_scores(
    monkeypatch, tmp_path, kind
):
    """Nor do rows name failures where no agent runs."""
    folder = str(saved(tmp_path / "llama", "llama"))
    record = AgentRecord("test", [], [], failure=AgentFailure("tool", "gone"))
    rows = rollouts()
    rows.data_sources[:] = ["mine", "mine"]
    rows.extra_infos[1] = record.add_to({})
    for agent in ("test", None):
        role = role_of(monkeypatch, agent, kind=kind, load=folder, rules={"mine": "agent"})
        output = role.score(rows)
        failures = output.report.failures
        assert bool(failures) == (agent is not None)
        assert output.report.is_scored == [True, agent is None]
        assert output.rows.is_scored.tolist() == [True, agent is None]


def test_scores_of_model_and_functions_are_added(monkeypatch):
    """The factor of the model is `model_weight`; a sample that failed keeps its score."""
    role = role_of(monkeypatch, model_weight=0.5)
    failure = FailedSample(1, "timeout", "")
    rules = RuleScores(torch.tensor([1.0, -9.0]), [{"mine": 1.0}, {}], [None, failure])
    of_model = RoleOutput(Scores(torch.tensor([4.0, 4.0])), ScoreReport([4.0, 4.0]))
    with patch.object(role, "score", return_value=of_model):
        output = role.score_beside_rules(rollouts(), rules)
    assert output.report.scores == [3.0, -9.0]
    assert output.report.parts == [{"mine": 1.0, "model": 4.0}, {"model": 4.0}]
    assert output.report.failures == [None, failure]
    assert isinstance(output.rows, Scores) and output.rows.scores.tolist() == [3.0, -9.0]
    rows = rollouts()  # labels choose: the rules gave 0 to a row labelled `model`
    rows.extra_infos[:] = [{"reward_model": {"style": style}} for style in ("rule", "model")]
    rules = RuleScores(torch.tensor([1.0, 0.0]), [{"mine": 1.0}, {}], [None, None])
    with patch.object(role, "score", return_value=of_model):
        output = role.score_beside_rules(rows, rules)
    assert output.report.scores == [1.0, 2.0]
    assert output.report.parts == [{"mine": 1.0}, {"model": 4.0}]
    with patch.object(role, "score", return_value=RoleOutput()):
        assert role.score_beside_rules(rollouts(), rules).rows is None, "not the leader"
