"""The bundle holds the files for a diagnosis, and no planted secret, prompt or response."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.secret_words import is_secret_name
from mindspeed_rlxf.ops.doctor.bundle import write_bundle
from mindspeed_rlxf.ops.doctor.findings import ok
from mindspeed_rlxf.ops.doctor.redact import Redactor
from mindspeed_rlxf.ops.doctor.report import Report

PROMPT = 'Wer hat "Grüße" gesagt?\nAntworte mit einem Wort.'
RESPONSE = "Der Nachbar von nebenan war es."
SECRETS = {
    "HF_TOKEN=hf_ZZplantedplantedplanted12": "hf_ZZplanted",
    "export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567": "0123456789abcdef",
    "connecting to https://alice:hunter2pass@host.example/x": "hunter2pass",
    "GET https://host.example/x?sig=querysecret&a=1": "querysecret",
    "Authorization: Bearer abcDEF123456ghi": "abcDEF123456ghi",
    "{'db_password': 'pl4nted-pass', 'x': 1}": "pl4nted-pass",
    '{"client_secret": "json-planted"}': "json-planted",
    "environ({'USER_PASSPHRASE': 'word-of-mine', 'HOME': '/home/alice'})": "word-of-mine",
    "MY_SERVICE_URL=internal.site.example": "internal.site.example",
    "key is sk-plantedplantedplanted0": "sk-planted",
    "AKIAABCDEFGHIJKLMNOP": "AKIAABCDEFGHIJKLMNOP",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.sIgNaTuRe": "sIgNaTuRe",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIplanted\n-----END RSA PRIVATE KEY-----": "MIIplanted",
    "ids [101, 2023, 2003, 1037, 3231, 6251, 102, 7, 9]": "2023, 2003",
    "ValueError: bad text 'a sentence of a prompt that nobody wrote down anywhere'": "a sentence",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like that of a failed run, with secrets and prompts in every file."""
    monkeypatch.setenv("SITE_TOKEN", "from-the-environment")
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "1800")
    folder = tmp_path / "ppo"
    (folder / "logs" / "actor").mkdir(parents=True)
    (folder / "checkpoints" / "iter_1").mkdir(parents=True)
    (folder / "checkpoints" / "iter_1" / "config.yaml").write_text("PLANTED WEIGHTS")
    (folder / "final.safetensors").write_bytes(b"PLANTED WEIGHTS")
    row = json.dumps({"prompt": [{"role": "user", "content": "Only the data set holds this."}]})
    (tmp_path / "train.jsonl").write_text(row + "\n")
    config = "data:\n  prompt_key: question\n  api_key: planted-yaml\n"
    config += f"  train_files: [{tmp_path}/train.jsonl]\n"
    (folder / "config.yaml").write_text(config)
    sample = {"iteration": 1, "prompt": PROMPT, "response": RESPONSE, "ground_truth": "Nachbar"}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n", encoding="utf-8")
    metrics = {"iteration": 1, "metrics": {"a": 1.5, "text": RESPONSE}, "time_s": 2.0}
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n{broken")
    lines = [*SECRETS, f"scoring {PROMPT!r}", json.dumps(PROMPT), RESPONSE, "from-the-environment"]
    lines.append("bad row: Only the data set holds this.")
    log = "\n".join(["an ordinary line", *lines, PROMPT, "the last line"]) + "\n"
    stack = 'Current thread 0x00007f (most recent call first):\n  File "/a b/c.py", line 1 in f\n'
    (folder / "logs" / "driver.log").write_text(log, encoding="utf-8")
    (folder / "logs" / "actor" / "rank_00003.log").write_text(stack + log, encoding="utf-8")
    (folder / "logs" / "notes.txt").write_text("PLANTED NOTES")
    (folder / "logs" / "rank_00009.log").symlink_to(folder / "samples.jsonl")
    failure = {
        "message": f"actor rank 3 failed: ValueError: {RESPONSE}",
        "rank": 3,
        "traceback": f'File "x.py"\nRuntimeError: {PROMPT!r}\n' + "\n".join(SECRETS),
    }
    (folder / "failure.json").write_text(json.dumps(failure), encoding="utf-8")
    return folder


def contents(file: Path) -> dict[str, str]:
    with tarfile.open(file) as archive:
        members = archive.getmembers()
        assert all(member.isfile() for member in members)
        texts = {m.name.partition("/")[2]: archive.extractfile(m) for m in members}
        return {name: stream.read().decode() for name, stream in texts.items() if stream}


def bundle(run: Path) -> dict[str, str]:
    report = Report("here", "0.1.0", "now", (ok("a", "1"),))
    return contents(write_bundle(run, report, run.parent))


def test_nothing_that_was_planted_is_in_the_bundle(run: Path) -> None:
    everything = "\n".join(f"{name}\n{text}" for name, text in bundle(run).items())
    planted = [*SECRETS.values(), "PLANTED", "planted-yaml", "from-the-environment", RESPONSE]
    planted += ["Only the data", "Grüße", "Gr\\u00fc", "Antworte mit", "Nachbar", "/home/alice"]
    assert [word for word in planted if word in everything] == []


def test_the_bundle_holds_configuration_failure_metrics_logs_and_stacks(run: Path) -> None:
    found = bundle(run)
    assert set(found) == {
        "README.txt", "doctor.json", "environment.json", "files.txt", "config.yaml",
        "failure.json", "metrics.jsonl", "logs/driver.log", "logs/actor/rank_00003.log",
        "stacks/logs/actor/rank_00003.log",
    }  # fmt: skip
    assert "prompt_key: question" in found["config.yaml"]
    assert found["logs/driver.log"].startswith("an ordinary line\n")
    assert found["logs/driver.log"].endswith("the last line\n")
    assert "actor rank 3 failed: ValueError: [removed]" in found["failure.json"]
    assert json.loads(found["metrics.jsonl"]) == {
        "iteration": 1, "time_s": 2.0, "metrics": {"a": 1.5},
    }  # fmt: skip
    assert found["stacks/logs/actor/rank_00003.log"].splitlines() == [
        "Current thread 0x00007f (most recent call first):", '  File "/a b/c.py", line 1 in f',
    ]  # fmt: skip
    assert json.loads(found["environment.json"])["HCCL_CONNECT_TIMEOUT"] == "1800"
    assert "final.safetensors" in found["files.txt"]  # its name and size


def test_a_file_that_vanishes_meanwhile_is_not_listed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lstat = os.lstat

    def look(path: str, **options: Any) -> os.stat_result:
        if str(path).endswith("final.safetensors"):
            raise FileNotFoundError(path)
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", look)
    listed = bundle(run)["files.txt"]
    assert "config.yaml" in listed and "final.safetensors" not in listed


def test_the_configurations_with_the_highest_numbers_are_taken(run: Path) -> None:
    for number in range(1, 103):
        (run / f"config.{number}.yaml").write_text("{}")
    (run / "configuration.yaml").write_text("{}")
    found = [name for name in bundle(run) if name.startswith("config")]
    assert found == [*(f"config.{number}.yaml" for number in range(54, 103)), "config.yaml"]


def test_a_second_bundle_does_not_replace_the_first(run: Path) -> None:
    report = Report("here", "0.1.0", "now", ())
    names = [write_bundle(run, report, run.parent).name for _ in range(2)]
    assert names == ["ppo-doctor.tar.gz", "ppo-doctor-2.tar.gz"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be the folder of a run"):
        write_bundle(tmp_path, Report("h", "b", "t", ()), tmp_path)


def test_ends_of_long_logs_are_taken(run: Path) -> None:
    file = run / "logs" / "driver.log"
    file.write_text("".join(f"line {i}\n" for i in range(100_000)))
    kept = bundle(run)["logs/driver.log"]
    assert kept.endswith("line 99999\n") and len(kept) <= 64 * 1024
    assert kept.startswith("line ")  # no half line


@pytest.mark.parametrize("name", ["HF_TOKEN", "api-key", "aws.secret", "password", "MY_KEY"])
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "line",
    [
        "max_tokens_per_micro_batch=8192",
        "data.prompt_key=question",
        "KeyError: 'actor'",
        "throughput/tokens_per_s : 812.5",
        "HCCL_CONNECT_TIMEOUT=1800 WORLD_SIZE=8",
        "[2026-01-31 12:00:00] iteration: 3 / 10 | critic/kl : 0.0123",
        "RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0",
        "shape [2, 3, 4] of actor rank 3 on host-1",
    ],
)
def test_ordinary_lines_stay_as_they_are(line: str) -> None:
    assert Redactor({}).clean(line) == line


def test_a_secret_is_removed_in_the_spellings_of_json_and_python() -> None:
    secret = 'p\u00e4"ss\\word'
    redactor = Redactor({"DB_PASSWORD": secret})
    for text in (
        secret,
        json.dumps([secret]),
        repr([secret]),
        json.dumps(secret, ensure_ascii=False),
    ):
        assert "ss" not in redactor.clean(text), text
