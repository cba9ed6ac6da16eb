"""Mistakes of the user, as opposed to failures of the run."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(ValueError):
    """Something the user can put right: every problem found, each `rule, value, remedy`.

    The command prints one `error:` line per problem and exits with 2.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        assert self.problems, "a UserError names at least one problem"
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[UserError], tuple[list[str]]]:
        return type(self), (self.problems,)


class ConfigError(UserError):
    """The configuration does not say a run that can be started."""
