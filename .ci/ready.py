"""Says whether a release may be published: whether its pages have an address.  Before that the sources are incomplete.

python .ci/ready.py
"""

import configparser
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def missing(root: Path = ROOT) -> list[str]:
    """What has to be set before a release."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(root / "setup.cfg")
    urls = dict(re.findall(r"^(\w+) *= *(https://\S+)$", config["metadata"].get("project_urls", ""), re.M))
    found = re.search(r'^BASE = "(.*)"$', (root / "autograd_hacks/errors.py").read_text(), re.M)
    base = found[1] if found else ""
    left = []
    if not {"Source", "Documentation"} <= urls.keys():
        left.append("setup.cfg: project_urls lacks Source or Documentation, each with an https address")
    if not base:
        left.append("autograd_hacks/errors.py: BASE is empty, so that messages end without an address")
    elif base != urls.get("Documentation", base):
        left.append(f"BASE is {base}, and project_urls has Documentation = {urls['Documentation']}")
    if "date-released:" not in (root / "CITATION.cff").read_text():
        left.append("CITATION.cff: no date-released")
    if "(unreleased)" in (root / "CHANGELOG.rst").read_text():
        left.append("CHANGELOG.rst: the version's heading says (unreleased)")
    return left


if __name__ == "__main__":
    print("\n".join(missing()), file=sys.stderr)
    sys.exit(bool(missing()))
