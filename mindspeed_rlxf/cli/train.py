"""`train`: compose the configuration, check it, then print it or run it.

Exit codes: 0 = done; 2 = user mistake, one `error:` line per problem; else the run's.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from mindspeed_rlxf.checkpoint.supervised import EXIT_STOPPED
from mindspeed_rlxf.cli.command_line import Parser, command, fail, option, program_name
from mindspeed_rlxf.cluster.errors import StorageUnreadable
from mindspeed_rlxf.compat.mindspeed_llm.translate import translate
from mindspeed_rlxf.compat.verl.files import read_verl
from mindspeed_rlxf.compat.verl.translate import translate_verl
from mindspeed_rlxf.config.compose import builtin_config_dir, compose, config_names
from mindspeed_rlxf.config.keys import NESTED_ROLES, to_yaml
from mindspeed_rlxf.config.load import find_missing_files, named_files, resolve_with_notes
from mindspeed_rlxf.config.problems import ConfigError, MissingFile, Problem, UserError
from mindspeed_rlxf.config.raw_config import RawConfig
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.starter import list_warnings
from mindspeed_rlxf.data.files import check_files, count_rows
from mindspeed_rlxf.reporting import run_log
from mindspeed_rlxf.reporting.console import opened
from mindspeed_rlxf.reporting.live import make_console
from mindspeed_rlxf.reporting.phases import phase

EPILOG = """\
dry_run=true         print the plan (ranks, batch sizes, memory, problems), then stop
--cfg job            print the resolved YAML, then stop
without a name       list the built-in configurations
The same command again resumes a run. docs/running.md has the rest."""

OPTIONS = (
    option("--config-name", "-cn", help="configuration, without .yaml"),
    option("--config-dir", "-cd", help="folder to look in before the built-in one"),
    option("--verl-config", help="a YAML of verl instead; changes are then in verl's keys"),
    option("--cfg", "-c", choices=["job"], help="print the resolved YAML and stop"),
    option("overrides", nargs="*", metavar="key=value", help="changes to the YAML"),
)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Train, or only print the configuration (--cfg) or the plan (dry_run); return the exit code.

    Notes are printed first, with --cfg to stderr. Silences Megatron's UserWarnings. User mistakes
    are printed, not raised, and return 2, as does a plan with problems. --cfg returns 0, training
    the run's code.
    """
    parser = Parser(
        OPTIONS,
        prog=program_name("train"),
        description="PPO, GRPO or online DPO from a YAML configuration.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run_log.begin()
    try:
        arguments = parser.parse_intermixed_args(argv)
        if arguments.verl_config:
            name = Path(arguments.verl_config).stem
            tree = read_verl(arguments.verl_config, arguments.overrides)
            raw = translate_verl(tree, count_rows)
        elif arguments.config_name is None:
            names = ", ".join(config_names([builtin_config_dir()])) or "none"
            parser.error(f"--config-name is required; built-in names: {names}")
        else:
            tree = compose(arguments.config_name, arguments.overrides, arguments.config_dir)
            name = arguments.config_name.removesuffix(".yaml")
            raw = translate(tree)
            for override in arguments.overrides:
                if override.lstrip("+~").startswith("hydra."):
                    meaning = "no effect, as Hydra runs no job; training.output_dir is the folder"
                    raw.note(meaning, override)
        # Those for verl are in its keys.
        overrides = () if arguments.verl_config else arguments.overrides
        try:
            config, notes = resolve_with_notes(raw, name, overrides)
        except ConfigError as error:
            raise ConfigError(_add_file_problems(raw, error.problems)) from error
        for note in notes:
            run_log.say(f"note: {note}", sys.stderr if arguments.cfg else sys.stdout)
        for warning in list_warnings(config):
            run_log.say(f"warning: {warning}", sys.stderr)
        if arguments.cfg == "job":
            print(to_yaml(config), end="")
            return 0
        # Megatron says at every import that Apex is missing; torch's own kernels are what we use.
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        if config.dry_run:
            return _dry_run(config, NESTED_ROLES in tree and not arguments.verl_config)
        with opened(make_console(config.logging.console)):
            with phase("loading libraries", prints=False):
                from mindspeed_rlxf.trainer.preflight import prepare
            with phase("reading tokenizer, prompts and headers of weights", prints=False):
                prepared = prepare(config)
            with phase("loading libraries", prints=False):
                from mindspeed_rlxf.trainer.run import run
            return run(config, prepared)
    except StorageUnreadable as error:
        print(f"stopped: {error}; run the same command again", file=sys.stderr, flush=True)
        return EXIT_STOPPED


def _add_file_problems(raw: RawConfig, problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems of keys and, after them, those of files; `prepare` cannot run then.

    In a plan for another machine a file that is not here is no problem.
    """
    by_text = {str(problem): problem for problem in problems}
    reported = {problem.key for problem in problems if isinstance(problem, MissingFile)}
    of_files: list[Problem] = []
    if raw.sections["device"].get("memory_gib") is None:
        of_files += [p for p in find_missing_files(raw) if p.key not in reported]
    present = [path for key, path in named_files(raw) if os.path.exists(path)]
    of_files += check_files(path for path in present if not os.path.isdir(path))
    by_text |= {str(problem): problem for problem in of_files}
    return [*by_text.values()]


def _dry_run(config: RunConfig, nested: bool) -> int:
    """Print the plan, notes and all problems; return 2 if there are problems, else 0.

    What this host lacks is a note; so are files, if it lacks devices or `device.memory_gib` says
    that the plan is for another machine. `nested`: the YAML
    has actor and reference under one key.
    """
    from mindspeed_rlxf.checkpoint.store import describe_start
    from mindspeed_rlxf.config.host_rules import check_devices, check_launch
    from mindspeed_rlxf.ops.planning.available import choose_kind
    from mindspeed_rlxf.ops.planning.plan import plan
    from mindspeed_rlxf.trainer.preflight import prepare

    run_plan = plan(config, nested)
    print(run_plan.text, flush=True)
    host_problems = check_devices(choose_kind(config))
    for problem in host_problems:
        print(f"note: this host cannot run it: {problem}", flush=True)
    is_elsewhere = config.device.memory_gib is not None or bool(host_problems)
    problems = [*check_launch(config), *run_plan.problems]
    try:
        if not config.validation.only:
            for line in describe_start(config):
                print(f"note: {line}", flush=True)
        prepared = prepare(config)
        num_prompts = len(prepared.train_prompts)
        if num_prompts > 0:
            num_drawn = config.training.train_iters * config.training.global_batch_size
            times = f"{num_drawn / num_prompts:.3g}"
            print(f"note: {num_prompts} prompts, drawn {times} times each", flush=True)
        for notice in prepared.notices:
            print(f"note: {notice}", flush=True)
    except UserError as error:
        for problem in error.problems:
            if is_elsewhere and isinstance(problem, MissingFile):
                print(f"note: not on this host: {problem}", flush=True)
            else:
                problems.append(problem)
    return fail(problems) if problems else 0
