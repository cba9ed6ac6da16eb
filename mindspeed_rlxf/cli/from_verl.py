"""`from-verl`: print a YAML of verl in our keys.

Exit codes: 0 = printed; 2 = user mistake, one `error:` line per problem. Notes go to stderr.
"""

import sys
from collections.abc import Sequence

import yaml

from mindspeed_rlxf.cli.command_line import Parser, command, fail, option, program_name
from mindspeed_rlxf.compat.verl.files import read_verl
from mindspeed_rlxf.compat.verl.translate import translate_verl
from mindspeed_rlxf.config.load import find_wrong_values
from mindspeed_rlxf.data.files import count_rows

OPTIONS = (
    option("file", metavar="FILE.yaml", help="verl's configuration"),
    option("overrides", nargs="*", metavar="key=value", help="changes in verl's keys"),
)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the YAML, for `ray_gpt.py --config-dir . --config-name NAME`; return the exit code.

    Reads the number of rows of data files, but neither models nor tokenizers.
    """
    parser = Parser(
        OPTIONS, prog=program_name("from-verl"), description="A YAML of verl in the keys used here."
    )
    arguments = parser.parse_intermixed_args(argv)
    translated = translate_verl(read_verl(arguments.file, arguments.overrides), count_rows)
    for note in translated.list_notes():
        print(f"note: {note}", file=sys.stderr)
    problems = [*translated.problems, *find_wrong_values(translated)]
    if problems:
        return fail(problems)
    sections = {name: section for name, section in sorted(translated.sections.items()) if section}
    print(yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=100), end="")
    return 0
