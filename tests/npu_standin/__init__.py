"""A functional stand-in for torch_npu on CPU, for rehearsals with the real MindSpeed sources.

`FOLDER` goes on the path of a rehearsal's processes and of nothing else. What is not there is an
AttributeError that names it: nothing is made up on demand.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
