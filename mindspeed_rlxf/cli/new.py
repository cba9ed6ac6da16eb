"""`new`: write a first configuration for a Hugging Face folder.

Exit codes: 0 = written; 2 = user mistake, one `error:` line per problem.
"""

import contextlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import yaml

from mindspeed_rlxf.cli.command_line import Parser, command, number, option, program_name
from mindspeed_rlxf.config.hf_config import WEIGHTS_FOLDER, read_hf_config
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.starter import GSM8K_KEYS, STAGES, first_yaml
from mindspeed_rlxf.data.files import describe_keys, empty_file, list_keys, look_up, read_rows
from mindspeed_rlxf.models.parameter_counts import model_elements
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.rewards.rules import BUILTIN_SOURCES, RULES

GSM8K = "dataset/gsm8k/train.parquet"
SEQ_LENGTH = 1024
LARGE = 2 * 10**9  # parameters of a model whose updates recompute activations
ROWS_READ = 1000
COLUMNS = (  # key of `data`, its default, and columns in order of preference
    ("prompt_key", "prompt", ("prompt", "messages", "question", "problem", "instruction", "query")),
    (
        "ground_truth_key",
        "ground_truth",
        ("ground_truth", "reward_model.ground_truth", "answer", "solution", "label", "labels"),
    ),
)
OPTIONS = (
    option("name", metavar="NAME", help="name of the configuration; writes NAME.yaml here"),
    option("--stage", choices=[*STAGES], default="grpo", help="what to train by (grpo)"),
    option("--model", required=True, help="Hugging Face folder"),
    option("--train-files", help=f"parquet or jsonl file of prompts ({GSM8K})"),
    option("--reward-model", help="folder of a sequence classifier; default: rules score"),
    option("--devices", type=number(1), default=8, help="devices of the host (8)"),
    option(
        "--seq-length",
        type=number(2),
        help=f"prompt and response, tokens ({SEQ_LENGTH}, or fewer if the model has fewer)",
    ),
)


def find_longest(model: str) -> int:
    """Return a model's `max_position_embeddings`; SEQ_LENGTH if config.json cannot be read."""
    with contextlib.suppress(ValueError):  # `resolve` reports it
        longest = read_hf_config(Path(model), WEIGHTS_FOLDER).get("max_position_embeddings")
        if isinstance(longest, int):
            return longest
    return SEQ_LENGTH


def choose_keys(file: str, by_rules: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Choose the keys of the section `data` for a file's columns, and rules for its data sources.

    Args:
        file: Data file; the first ROWS_READ rows are read.
        by_rules: Whether rules score, which need ground truths and data sources.

    Returns:
        (keys of `data`, data source -> rule without those that have a built-in rule).

    Raises:
        UserError: The file cannot be read, or lacks a column of prompts or ground truths.
    """
    rows = [row for _, row in islice(read_rows(file), ROWS_READ) if isinstance(row, dict)]
    if not rows:
        raise UserError(empty_file(file))
    columns = list_keys(rows[0])
    keys: dict[str, str] = {}
    for key, default, names in COLUMNS:
        column = next((name for name in names if name in columns), None)
        if column is None and (key == "prompt_key" or by_rules):
            rule = f"must have a column of {'prompts' if key == 'prompt_key' else 'answers'}"
            remedy = f"name it {default} (there are {describe_keys(columns)})"
            if key != "prompt_key":
                remedy += ", or give --reward-model"
            raise UserError(Problem("--train-files", rule, file, remedy))
        if column not in (None, default):
            keys[key] = str(column)
    if not by_rules:
        return keys, {}
    rules: dict[str, str] = {}
    truth_key = keys.get("ground_truth_key", "ground_truth")
    for row in rows:
        source = look_up(row, "data_source")
        if not isinstance(source, str) or not source:
            source = keys["default_data_source"] = "mine"
        if source not in BUILTIN_SOURCES and source not in rules:
            rules[source] = choose_rule(str(look_up(row, truth_key)))
    return keys, rules


def choose_rule(truth: str) -> str:
    """Return the rule for ground truths like this one: LaTeX, a number, or other text."""
    if "\\" in truth:
        return "math"
    score = RULES["gsm8k"](truth, truth).score
    return "gsm8k" if score is not None and score > 0 else "exact_match"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Write NAME.yaml into the current folder and print the next command; return the exit code.

    Nothing is written if the file exists, or the configuration would be refused.
    """
    parser = Parser(
        OPTIONS, prog=program_name("new"), description="A first configuration for a model."
    )
    arguments = parser.parse_args(argv)
    name = arguments.name.removesuffix(".yaml")
    file = Path(f"{name}.yaml")
    if file.exists():
        remedy = "choose another name, or remove it"
        raise UserError(Problem("NAME", "must not exist", str(file), remedy))
    train_files = arguments.train_files or GSM8K
    keys: dict[str, str] = GSM8K_KEYS
    rules: dict[str, str] = {}
    if arguments.train_files is None and not Path(GSM8K).exists():
        print(f"note: {GSM8K} is not there yet: see examples/data_preprocess, or --train-files")
    else:
        keys, rules = choose_keys(train_files, arguments.reward_model is None)
    seq_length = arguments.seq_length or min(SEQ_LENGTH, find_longest(arguments.model))

    def write_yaml(recompute: bool) -> tuple[str, RunConfig]:
        text = first_yaml(
            arguments.stage,
            arguments.model,
            train_files,
            arguments.devices,
            seq_length,
            arguments.reward_model,
            keys,
            rules,
            recompute,
        )
        return text, resolve({**yaml.safe_load(text), "dry_run": True}, name)

    text, config = write_yaml(recompute=False)
    if model_elements(config.actor_rollout.architecture, Head.LANGUAGE_MODEL) >= LARGE:
        text, _ = write_yaml(recompute=True)
    file.write_text(text, encoding="utf-8")
    run = f"mindspeed-rlxf train --config-dir {file.parent} --config-name {file.stem}"
    print(f"wrote {file}; its plan: {run} dry_run=true")
    return 0
