"""The README's lines that find a pretrained model do find it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT
from tests.real.packages import SMOLLM2, gguf_file

pytestmark = pytest.mark.models


def test_the_readme_finds_the_file_of_smollm2():
    (line,) = re.findall(r"^MODEL=.*$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    # As in an active environment.
    script = f'python() {{ "{sys.executable}" "$@"; }}\n{line}\necho "$MODEL"'
    found = subprocess.check_output(["bash", "-c", script], text=True).strip()
    assert Path(found).samefile(gguf_file(SMOLLM2))
