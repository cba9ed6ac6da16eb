"""Settings of the site; `make docs` builds it. `index.md` is the navigation."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_site"))

project = "mindspeed_rlxf"
author = "The mindspeed_rlxf authors"
project_copyright = author
extensions = ["myst_parser", "offline"]
exclude_patterns = ["_site"]
root_doc = "index"

myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]  # "```math" is also a formula on GitHub
myst_heading_anchors = 4  # so that links to headings work as they do where the files are stored

html_theme = "furo"
html_title = project
html_static_path = ["_site/static"]
html_css_files = ["tables.css"]
html_math_renderer = "mathml"
html_search_language = "en_zh"
html_copy_source = False
html_show_sourcelink = False
highlight_language = "text"
nitpicky = True
