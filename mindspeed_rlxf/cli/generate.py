"""`generate`: answer prompts with a run's policy, one of its checkpoints, or a model's folder.

Exit codes: 0 = done; 2 = user mistake, one `error:` line per problem; 75 = interrupted.
"""

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rlxf.checkpoint.supervised import EXIT_STOPPED
from mindspeed_rlxf.cli.command_line import (
    Parser,
    command,
    fail,
    number,
    option,
    program_name,
    progress_bar,
)
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.problems import Problem, UserError

if TYPE_CHECKING:
    from mindspeed_rlxf.ops.generation.generator import Generator

SAMPLING = ("temperature", "top_k", "top_p")
OPTIONS = (
    option("source", help="run directory, checkpoint of a run, or Hugging Face folder"),
    option("--checkpoint", type=number(1), metavar="N", help="of a run (its newest)"),
    option("--prompt", action="append", metavar="TEXT", help="a prompt; may be given again"),
    option("--file", help="prompts: lines of .txt, or rows of .jsonl, .json, .parquet"),
    option("--chat", action="store_true", help="strings are messages; alone: a conversation"),
    option("--output", help="jsonl file to write; absent: standard output"),
    option("--n", type=number(1), default=1, help="responses per prompt (1)"),
    option("--greedy", action="store_true", help="the likeliest tokens; else as the run samples"),
    option("--temperature", type=float, help="samples; divides the logits"),
    option("--top-k", type=int, help="samples among this many tokens; 0 = all"),
    option("--top-p", type=float, help="samples among the tokens of this probability"),
    option("--max-new-tokens", type=int, help="longest response"),
    option("--seed", type=number(0), help="of the samples (the run's)"),
    option("--engine", choices=["auto", "native", "transformers"], default="auto"),
    option("--device", choices=["auto", "cpu", "cuda", "npu"], default="cpu", help="(cpu)"),
)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Generate; print responses, or write a jsonl file; return the exit code.

    Notes go to stderr.
    """
    parser = Parser(
        OPTIONS,
        prog=program_name("generate"),
        description="Responses of a run's policy, or of a model.",
        epilog="A run's own keys say how to sample, unless an option does.",
        allow_abbrev=False,
    )
    arguments = parser.parse_args(argv)
    _check(arguments)
    # Megatron says at every import that Apex is missing; torch's own kernels are what we use.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    from mindspeed_rlxf.ops.generation.generator import open_generator
    from mindspeed_rlxf.ops.generation.source import find_source

    path = Path(arguments.source).absolute()
    source = find_source(path, _changes(arguments), arguments.checkpoint)
    actor = source.actor
    sampling = "greedy"
    if actor.do_sample:
        sampling = f"temperature {actor.temperature:g}, top_k {actor.top_k}, top_p {actor.top_p:g}"
    limit = f"at most {actor.max_new_tokens} tokens"
    print(
        f"note: weights of {source.description}; {sampling}, {limit}", file=sys.stderr, flush=True
    )
    try:
        kind = DeviceKind(arguments.device)
        with open_generator(source, kind, arguments.engine) as generator:
            if arguments.chat and not generator.tokenizer.chat_template:
                rule = f"needs a chat template, which {source.tokenizer} has not"
                raise UserError(Problem("--chat", rule, remedy="leave it out"))
            seed = source.seed if arguments.seed is None else arguments.seed
            if arguments.prompt or arguments.file:
                return _answer(generator, arguments, seed)
            return _converse(generator, seed)
    except KeyboardInterrupt:
        print("stopped: SIGINT", file=sys.stderr)
        return EXIT_STOPPED
    except UserError:
        raise
    except ValueError as error:
        return fail([Problem("", str(error))])


def _check(arguments: argparse.Namespace) -> None:
    """Raise UserError for options that contradict each other."""
    problems = []
    if arguments.prompt and arguments.file:
        problems.append(
            Problem("--prompt and --file", "must not both be given", remedy="remove one")
        )
    has_prompts = arguments.prompt or arguments.file
    if not has_prompts and not arguments.chat:
        remedy = "give --prompt, --file or --chat"
        problems.append(Problem("", "there is nothing to answer", remedy=remedy))
    if not has_prompts and (arguments.output or arguments.n > 1):
        rule = "need --prompt or --file"
        problems.append(Problem("--output and --n", rule, remedy="remove them"))
    sampling_flags = []
    for name in SAMPLING:
        if getattr(arguments, name) is not None:
            sampling_flags.append("--" + name.replace("_", "-"))
    if arguments.greedy and sampling_flags:
        rule = f"must not be given with {', '.join(sampling_flags)}"
        problems.append(Problem("--greedy", rule, remedy="remove one"))
    if arguments.temperature is not None and arguments.temperature <= 0:
        remedy = "use --greedy for the likeliest tokens"
        problems.append(Problem("--temperature", "must be above 0", arguments.temperature, remedy))
    if arguments.output and Path(arguments.output).exists():
        rule = "must not exist yet"
        problems.append(Problem("--output", rule, arguments.output, "give another file"))
    if problems:
        raise UserError(problems)


def _changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the actor's keys that the options replace; a sampling option asks for sampling."""
    changes: dict[str, Any] = {}
    for name in (*SAMPLING, "max_new_tokens"):
        value = getattr(arguments, name)
        if value is not None:
            changes[name] = value
    if arguments.greedy:
        changes["do_sample"] = False
    elif any(name in changes for name in SAMPLING):
        changes["do_sample"] = True
    return changes


def _answer(generator: "Generator", arguments: argparse.Namespace, seed: int) -> int:
    """Answer the prompts of the command or its file; return 0."""
    from mindspeed_rlxf.ops.generation.generator import record

    if arguments.file:
        prompts = generator.read_file(arguments.file, arguments.chat)
    else:
        texts = [generator.as_message(text, arguments.chat) for text in arguments.prompt]
        prompts = generator.read_texts(texts)
        if not arguments.chat and generator.tokenizer.chat_template:
            note = "note: a prompt is the text as it is; --chat puts it into the chat template"
            print(note, file=sys.stderr, flush=True)
    answers = generator.answer(prompts, seed, arguments.n)
    if not (arguments.file or arguments.output):
        has_several = len(prompts) * arguments.n > 1
        for number, responses in enumerate(answers, 1):
            for i, response in enumerate(responses, 1):
                if has_several:
                    print(f"--- prompt {number}, response {i} ({response.finish_reason})")
                print(response.text, flush=True)
        return 0
    with contextlib.ExitStack() as opened:
        stream = sys.stdout
        if arguments.output:
            stream = opened.enter_context(open(arguments.output, "w", encoding="utf-8"))
        progress = opened.enter_context(progress_bar("prompts"))
        for index, (prompt, responses) in enumerate(zip(prompts, answers, strict=True)):
            stream.writelines(record(index, prompt, response) for response in responses)
            stream.flush()
            progress(index + 1, len(prompts))
    if arguments.output:
        print(f"written: {arguments.output}", file=sys.stderr)
    return 0


def _converse(generator: "Generator", seed: int) -> int:
    """Answer lines of standard input until it ends; each sees the conversation so far."""
    messages = generator.begin_chat()
    if sys.stdin.isatty():
        print("note: an empty line ends the conversation", file=sys.stderr)
    for turn, line in enumerate(_read_lines()):
        messages.append({"role": "user", "content": line})
        (responses,) = generator.answer(generator.read_texts([messages]), seed, 1, turn)
        print(responses[0].text, flush=True)
        messages.append({"role": "assistant", "content": responses[0].text})
    return 0


def _read_lines() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            return
        yield line.strip()
