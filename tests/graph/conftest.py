"""The architectures of tests/programs are labelled here, too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "programs"))
