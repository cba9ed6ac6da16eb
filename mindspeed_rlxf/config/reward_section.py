"""The section `reward`: what scores responses; reward functions' names and calls."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.config.enums import RewardKind
from mindspeed_rlxf.config.fields import FilePath, Section, Strings, Word, free, key
from mindspeed_rlxf.config.problems import Problem, ref
from mindspeed_rlxf.config.roles import RoleConfig
from mindspeed_rlxf.config.secrets import Secret, find_masks, url_secret

GIVEN = ("prompt", "response", "ground_truth", "extra_info")
"""Keyword arguments in every call."""
DATA_SOURCE = "data_source"
"""Further keyword argument, for functions with a parameter of this name."""
OF_VERL = "solution_str"
"""verl's parameter for the response; a function with it is called as verl does."""
STRUCTURED = "structured_ground_truth"
"""Entry of `extra_info` with a ground truth that is a list or an object, for functions."""
BY_SOURCE = "rule"
"""Replaces a function name: the rule belonging to the sample's data source."""
AGENT_RULE = "agent"
"""Rule that scores a sample by what its agent has given."""
RULES_OF_PROGRAMS = frozenset({"code", "code_all"})
"""Rules running programs from responses in a sandbox."""


@dataclass(frozen=True)
class Adapter:
    """How functions and classes with another toolkit's signature score.

    Attributes:
        keywords: Function or class -> keywords that it must accept when the file is read; None if
            it is not of that toolkit.
        adapt: Called where samples are scored, with function or class and the YAML's `arguments`;
            returns a function that takes the keywords of the run and these arguments.
    """

    keywords: Callable[[Any], tuple[str, ...] | None]
    adapt: Callable[[Any, Mapping[str, Any]], Callable[..., Any]]


ADAPTERS: list[Adapter] = []
"""Registered by modules that the scoring processes import too, as a plan names them."""


def find_adapter(function: Any) -> Adapter | None:
    """Return the adapter of a function or a class, None if it has our signature."""
    for adapter in ADAPTERS:
        if adapter.keywords(function) is not None:
            return adapter
    return None


def split_name(function: str) -> tuple[str, str] | None:
    """Split `path/to/file.py:name` at the last colon; return (path, name). Name may be empty.

    None without a colon, or if the path does not end with `.py`.
    """
    path, colon, name = function.rpartition(":")
    return (path, name) if colon and path.endswith(".py") else None


def find_function(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return the module's function `name`, or its static method `Class.method`.

    Any callable but a class will do, and a class that an adapter takes.

    Raises:
        ValueError: It is missing, another class or not callable.
    """
    function: Any = module
    for attribute in name.split("."):
        function = getattr(function, attribute, None)
    if not callable(function) or (inspect.isclass(function) and find_adapter(function) is None):
        public_functions = []
        for attribute, candidate in vars(module).items():
            if inspect.isfunction(candidate) and not attribute.startswith("_"):
                public_functions.append(attribute)
        has = ", ".join(public_functions) or "none"
        raise ValueError(f"the file must have a function {name}, and no class; it has {has}")
    return function  # type: ignore[no-any-return]


def keywords_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the keyword arguments passed by the run, without the YAML's `arguments`.

    GIVEN, then `data_source` if the function names this parameter (`**kwargs` does not count). A
    function of verl gets OF_VERL for the response, and no prompt.
    """
    parameters = inspect.signature(function).parameters
    if OF_VERL in parameters:
        return (DATA_SOURCE, OF_VERL, "ground_truth", "extra_info")
    takes = DATA_SOURCE in parameters
    return (*GIVEN, DATA_SOURCE) if takes else GIVEN


def check_call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Check a reward function's signature: it must accept GIVEN and `arguments` as keywords.

    Args:
        function: The reward function.
        arguments: From the YAML; names in GIVEN and `data_source` are taken.

    Raises:
        ValueError: The broken rule.
    """
    taken = sorted({*arguments} & {*GIVEN, DATA_SOURCE})
    if taken:
        raise ValueError(f"arguments must not have {', '.join(taken)}, which the run gives")
    adapter = find_adapter(function)
    adapted = None if adapter is None else adapter.keywords(function)
    keywords = keywords_of(function) if adapted is None else adapted
    try:
        inspect.signature(function).bind(**dict.fromkeys((*keywords, *arguments)))
    except (TypeError, ValueError) as error:
        signature = ", ".join((*keywords, *map(str, arguments)))
        rule = f"must be a function of ({signature}), called by keyword: {error}"
        raise ValueError(rule) from None


class SandboxConfig(Section):
    """Limits for programs run in bubblewrap (docs/data_and_rewards.md)."""

    section_used_if = "runs_programs"

    unsafe: bool = free(False, "where bubblewrap does not work, run programs without isolation")
    python: str | None = key(
        None, "interpreter of programs, with its packages; null = Python's standard library alone"
    )
    cpu_s: float = key(6.0, "CPU time of one program, seconds", gt=0)
    wall_s: float = key(12.0, "wall-clock time of one program, seconds", gt=0)
    response_s: float = key(
        20.0, "time of all test cases of a response, seconds; the rest count as failed", gt=0
    )
    memory_mb: int = key(512, "memory of one program with its children, MiB", ge=32)
    file_mb: int = key(16, "size of a file, and of all files of a program, MiB", ge=1)
    files: int = key(64, "open files of a process; a program may make 100 x as many", ge=16)
    processes: int = key(16, "processes and threads of one program", ge=1)
    output_kb: int = key(256, "standard output of one program, KiB", ge=1)


PART_NAME = re.compile(r"(?!(failed|model)(_|$))[A-Za-z0-9_.-]{1,64}")
"""Reward part names in metrics, where `failed` and `model` mean something else."""


class FunctionConfig(Section):
    """A function or server contributing a weighted score to the reward.

    In the YAML the text for `function` may replace the section.
    """

    name: str = key(..., "name of its part in metrics and samples; absent = the function's name")
    function: str | None = key(
        None, "path/to/file.py:name, a built-in rule, or `rule`: the rule of the data source"
    )
    sha256: str | None = key(
        None, "SHA-256 of the file's text; a run is not resumed with another text"
    )
    url: Secret | None = free(None, "in place of function: a server that scores batches")
    headers: dict[str, Secret] = free(
        {}, "url: headers of each request, such as `Authorization: Bearer ${oc.env:KEY}`"
    )
    batch_size: int = key(16, "url: samples per request at most", ge=1)
    weight: float = key(1.0, "factor of its score in the sum")
    arguments: dict[str, Any] = key({}, "further keyword arguments of the function")
    data_sources: Strings = key((), "data sources that it scores; none = all")

    @field_validator("url", mode="before")
    @classmethod
    def _hide_secrets(cls, value: Any) -> Any:
        return url_secret(value) if isinstance(value, str) else value

    def applies_to(self, data_source: str) -> bool:
        """Whether the function scores samples from this data source."""
        return not self.data_sources or data_source in self.data_sources  # none = all

    def _broken_rules(self) -> Iterator[Problem]:
        if not PART_NAME.fullmatch(self.name):
            rule = "must be letters, digits and any of `_.-`, and not begin with failed or model"
            yield Problem("name", rule, self.name, "give the function another name")
        if (self.function is None) == (self.url is None):
            yield Problem("function", f"or {ref('url')} must be given", remedy="name one of them")
        yield from find_masks("headers", self.headers)
        if self.url is not None:
            yield from find_masks("", {"url": self.url})
            if not re.fullmatch(r"https?://[^/\s]\S*", self.url.get_secret_value()):
                yield Problem(
                    "url", "must begin with http:// or https://", str(self.url), "correct it"
                )
        if self.headers and self.url is None:
            yield Problem("headers", f"need {ref('url')}", remedy="remove them")
        if self.arguments and self.function is None:
            yield Problem("arguments", f"need {ref('function')}", remedy="remove them")


class RewardConfig(RoleConfig):
    """The reward: a rule (no model, on the CPU), functions, or a reward model."""

    load: FilePath | None = key(None, "folder of the reward model, Hugging Face's or Megatron's")
    kind: Annotated[RewardKind, Word] = key(
        RewardKind.MODEL,
        "model (Megatron), huggingface (any sequence classifier), rule (no model), or role "
        "(a class that a plugin registers for the role)",
    )
    model: str | None = key(None, "name of the architecture; none for a rule")  # type: ignore[assignment]
    architecture: ArchitectureConfig | None = key(None, "none for a rule")  # type: ignore[assignment]
    rules: dict[str, str] = key(
        {},
        "data source -> rule, beside the table",
        used_if="reads_reward_rules",
        only_if="!verifier",
    )
    verifier: bool = key(
        False,
        "score every prompt by algorithm.verifier_function",
        only_if="kind=rule; !scoring_functions",
    )
    sandbox: SandboxConfig = key(SandboxConfig(), "isolation of programs that rules run")
    function: FunctionConfig | None = key(
        None, "a function of yours that scores, path/to/file.py:name; see docs/data_and_rewards.md"
    )
    functions: Annotated[tuple[FunctionConfig, ...], Word] = key(
        (), "several functions; their weighted scores are added, also to the score of a model"
    )
    model_weight: float = key(
        1.0, "factor of the model's score beside functions", used_if="scoring_functions"
    )
    allow_changed_function: bool = free(
        False,
        "resume although the text of a function's file has changed",
        used_if="scoring_functions",
    )
    agent_text: Literal["all", "last_turn"] = key(
        "all",
        "what rules and functions get of a conversation: all, observations included, or last_turn",
    )
    processes: int = free(8, "processes that score beside each replica that generates", ge=1)
    timeout_s: float = free(30.0, "longest time to score one sample, seconds", gt=0)
    worker_memory_gib: float = free(8.0, "address space of a scoring process, GiB", gt=0)
    failed_score: float = key(
        0.0,
        "score of a sample whose scoring failed, perhaps by its response",
        used_if="counts_failures",
    )
    max_failed: Annotated[int, Field(ge=0)] | None = free(
        None,
        "most failed samples of a batch before the run stops; null = a tenth",
        used_if="counts_failures",
    )

    @property
    def scoring_functions(self) -> tuple[FunctionConfig, ...]:
        """The functions whose weighted scores make the reward: `function`, else `functions`."""
        return (self.function,) if self.function is not None else self.functions

    @property
    def needs_data_source(self) -> bool:
        """Whether a row's data source decides by what it is scored."""
        if self.kind is not RewardKind.RULE:
            return False
        if not self.scoring_functions:
            return True
        return any(
            function.data_sources or function.function == BY_SOURCE
            for function in self.scoring_functions
        )

    @property
    def runs_code(self) -> bool:
        """Whether a rule or function scores, alone or beside a model."""
        return self.kind is RewardKind.RULE or bool(self.scoring_functions)

    @property
    def chooses_by_label(self) -> bool:
        """Whether a row's `reward_model.style` chooses between the model and rules."""
        return self.kind is not RewardKind.RULE and bool(self.scoring_functions or self.rules)

    @property
    def scores_by_agent(self) -> bool:
        """Whether some rule or function here is the rule `agent`."""
        return AGENT_RULE in self._rule_names

    def agent_weight(self, data_source: str) -> float:
        """Return the factor of an agent's rewards in the scores of a data source; 0 = not used."""
        of_source = self.rules.get(data_source) == AGENT_RULE
        applying = [f for f in self.scoring_functions if f.applies_to(data_source)]
        if not applying:
            return float(of_source and self.kind is RewardKind.RULE)
        return sum(
            f.weight
            for f in applying
            if f.function == AGENT_RULE or (f.function == BY_SOURCE and of_source)
        )

    @property
    def runs_programs(self) -> bool:
        """Whether some rule or function here runs programs from responses (RULES_OF_PROGRAMS)."""
        return not RULES_OF_PROGRAMS.isdisjoint(self._rule_names)

    @property
    def _rule_names(self) -> set[str | None]:
        """The rules that data sources and functions name, with paths of files and None (a url)."""
        names: set[str | None] = set(self.rules.values())
        for function in self.scoring_functions:
            names.add(function.function)
        return names

    def _broken_rules(self) -> Iterator[Problem]:
        yield from super()._broken_rules()
        if self.function is not None and self.functions:
            yield Problem(
                "function", f"must not stand beside {ref('functions')}", remedy="keep one"
            )
        names = [function.name for function in self.functions]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            rule = f"must each have a name of its own, {', '.join(repeated)} is there twice"
            yield Problem("functions", rule, remedy="add name: to one of them")
        # Scoring may not end before the test cases of each function that runs programs.
        needed_s = self.sandbox.response_s * self._max_programs_per_sample()
        if self.runs_programs and self.timeout_s <= needed_s:
            rule = f"must be above {needed_s:g}, {ref('sandbox.response_s')} for each function"
            yield Problem("timeout_s", rule, self.timeout_s, "raise it, or lower that")

    def _max_programs_per_sample(self) -> int:
        """Return how many functions run programs for one sample: at most, and at least 1."""
        data_sources = {"", *self.rules}
        for function in self.scoring_functions:
            data_sources.update(function.data_sources)
        num_programs = 1
        for source in data_sources:
            num_programs = max(
                num_programs,
                sum(self._runs_programs(function, source) for function in self.scoring_functions),
            )
        return num_programs

    def _runs_programs(self, function: FunctionConfig, source: str) -> bool:
        rule = self.rules.get(source) if function.function == BY_SOURCE else function.function
        return function.applies_to(source) and rule in RULES_OF_PROGRAMS
