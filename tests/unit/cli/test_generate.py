"""`generate`: mistakes, conversations, files of prompts, and where the weights come from."""

import io
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.checkpoint.store import EXPORTED, RunStore
from mindspeed_rlxf.cli.generate import main
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.ops.generation import generator
from mindspeed_rlxf.ops.generation.source import find_source
from mindspeed_rlxf.rollout.rollout_engine import FinishReason, GenerationResult
from tests.unit.checkpoint.runs import Case
from tests.unit.config.conftest import make_tree, no_cluster
from tests.unit.data.byte_tokenizer import write_tokenizer
from tests.unit.weights.folders_of import make_folder

__all__ = ["make_tree", "no_cluster"]
VOCAB = 400
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"


class Parrot:
    """An engine that answers with the last character of the prompt, once for each token."""

    last: "Parrot"

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.requests = tokenizer, list[Any]()

    def generate(self, requests: Sequence[Any]) -> Iterator[GenerationResult]:
        self.requests += requests
        for request in reversed(requests):
            count = request.settings.max_new_tokens
            tokens = [int(request.prompt[-1])] * count
            yield GenerationResult(request.place, tokens, [0.0] * count, FinishReason.LENGTH, 0)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tokenizer; `generate` answers by a Parrot, kept at `Parrot.last`."""
    folder = tmp_path / "model"
    make_folder(folder, "llama", vocab_size=VOCAB, max_position_embeddings=64)
    write_tokenizer(folder)

    @contextmanager
    def opened(source: Any, *_: Any) -> Iterator[generator.Generator]:
        tokenizer = generator.load_tokenizer(source.tokenizer)
        tokenizer.chat_template = TEMPLATE
        Parrot.last = Parrot(tokenizer)
        yield generator.Generator(source, Parrot.last, tokenizer)  # type: ignore[arg-type]

    monkeypatch.setattr(generator, "open_generator", opened)
    return folder


WRONG: dict[str, tuple[list[str], str]] = {
    "nothing to do": ([], "there is nothing to answer; give --prompt, --file or --chat"),
    "both": (["--prompt", "a", "--file", "b.txt"], "--prompt and --file must not both be given"),
    "greedy": (["--prompt", "a", "--greedy", "--top-p", "0.5"], "--greedy must not be given with"),
    "output of a conversation": (["--chat", "--output", "o.jsonl"], "need --prompt or --file"),
    "no temperature": (["--prompt", "a", "--temperature", "0"], "use --greedy"),
    "no position": (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens=0"),
    "long": (["--prompt", "a" * 60, "--max-new-tokens", "9"], "length of the prompt=60 with max"),
    "no file": (["--file", "gone.txt"], "--file=gone.txt cannot be read"),
    "a chat of rows": (["--file", "a.jsonl", "--chat"], "leave --chat out"),
    "an empty prompt": (["--prompt", " "], "not empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named(model, case, capsys):
    options, expected = WRONG[case]
    assert main([str(model), *options]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("error: ") and expected in line], said


def test_each_turn_of_a_conversation_sees_the_ones_before(model, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\ncd\n\nnever\n"))
    assert main([str(model), "--chat", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out == ">>\n>>\n"
    read = [Parrot.last.tokenizer.decode(each.prompt) for each in Parrot.last.requests]
    assert read == ["<user>ab<answer>", "<user>ab<assistant>>><user>cd<answer>"]
    assert [each.sample_id for each in Parrot.last.requests] == [0, 1]


def test_lines_are_answered_in_order_and_written_with_their_prompts(model, tmp_path, capsys):
    file, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("1+\n\n2-\n", encoding="utf-8")
    words = ["--file", str(file), "--n", "2", "--max-new-tokens", "3", "--seed", "5"]
    assert main([str(model), *words, "--output", str(output)]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["prompt_id"], line["prompt"], line["response"]) for line in lines] == [
        (0, "1+", "+++"), (0, "1+", "+++"), (1, "2-", "---"), (1, "2-", "---"),
    ]  # fmt: skip
    assert [(each.sample_id, each.seed) for each in Parrot.last.requests] == [
        (n, 5) for n in range(4)
    ]
    assert main([str(model), *words, "--output", str(output)]) == 2, "it is not overwritten"
    assert "must not exist yet" in capsys.readouterr().err
    assert main([str(model), *words, "--chat"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["prompt"] == "<user>1+<answer>"


def test_a_model_samples_as_its_file_says_unless_an_option_does(model, capsys):
    keys = {"do_sample": True, "temperature": 0.5, "top_p": 0.75, "max_new_tokens": 7}
    (model / "generation_config.json").write_text(json.dumps(keys))
    for options, expected in (
        ([], (True, 0.5, 0.75, 7)),
        (["--temperature", "2"], (True, 2.0, 0.75, 7)),
        (["--greedy"], (False, 0.5, 0.75, 7)),
    ):
        assert main([str(model), "--prompt", "a", *options]) == 0
        asked = Parrot.last.requests[0].settings
        assert (asked.do_sample, asked.temperature, asked.top_p, asked.max_new_tokens) == expected


def test_a_run_gives_its_newest_whole_checkpoint_and_its_keys(make_tree, model, tmp_path):
    keys = {"tokenizer_name_or_path": str(model), "seed": 77, "keep_last": 9}
    case = Case(make_tree, tmp_path / "run", **keys)
    sampling = {"do_sample": True, "top_k": 9, "stop_strings": ("x",)}
    actor = case.config.actor_rollout.model_copy(update=sampling)
    case.config = case.config.model_copy(update={"actor_rollout": actor})
    case.restart()
    case.iterate(1, 2, 3)
    for number in (1, 2):
        folder = case.store.path(number) / "actor"
        (folder / "state_00000.safetensors").touch()
        shutil.copy(model / "config.json", folder)
    (case.store.path(3) / "trainer" / "state.json").unlink()  # damaged
    run, checkpoint = case.directory.path, case.store.path(1)
    found = find_source(run, {"top_k": 5})
    assert found.actor.load == str(case.store.path(2) / "actor") and found.seed == 77
    assert (found.actor.do_sample, found.actor.top_k, found.actor.stop_strings) == (
        True, 5, ("x",),
    )  # fmt: skip
    for path in (checkpoint, checkpoint / "actor"):
        assert find_source(path, {}).actor.load == str(checkpoint / "actor")
    with pytest.raises(UserError, match="min_new_tokens=9 must be at most max_new_tokens=4"):
        find_source(run, {"min_new_tokens": 9, "max_new_tokens": 4})
    assert find_source(run, {}, 1).actor.load == str(checkpoint / "actor")
    with pytest.raises(UserError, match=r"--checkpoint=3 must be the iteration .*; use 2"):
        find_source(run, {}, 3)
    with pytest.raises(UserError, match="needs a run directory"):
        find_source(checkpoint, {}, 1)
    # Sharded state of another engine: the exported weights, if they are of this iteration.
    (case.store.path(2) / "actor" / "state_00000.safetensors").unlink()
    with pytest.raises(UserError, match="sharded state"):
        find_source(run, {})
    shutil.copytree(model, run / "final" / "actor_hf")
    RunStore(case.directory.checkpoints).point(EXPORTED, 2)
    assert find_source(run, {}).actor.load == str(run / "final" / "actor_hf")


def test_a_folder_that_is_no_source_is_named(make_tree, tmp_path):
    case = Case(make_tree, tmp_path / "run")
    with pytest.raises(UserError, match="must have a whole checkpoint"):
        find_source(case.directory.path, {})
    with pytest.raises(UserError, match="must be a run directory, a checkpoint of a run, or"):
        find_source(tmp_path, {})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        find_source(tmp_path, {})


def test_a_chat_without_a_template_is_one_mistake(model, monkeypatch, capsys):
    monkeypatch.setitem(globals(), "TEMPLATE", None)
    assert main([str(model), "--chat", "--prompt", "a"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: --chat needs a chat template")
