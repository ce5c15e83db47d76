"""All metadata is in setup.cfg; here the pages that ``python -m autograd_hacks explain`` prints go into the wheel."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PAGES = "autograd_hacks/pages"


class WithPages(build_py):
    """Copies docs/*.rst and docs/integrations/*.rst into the package, as it is built: they stand in docs alone."""

    def _pages(self) -> list[str]:
        return sorted(path.as_posix() for pattern in ("*.rst", "integrations/*.rst") for path in Path("docs").glob(pattern))

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a clone has them in docs
            if not self._pages():
                raise FileNotFoundError(
                    "docs/*.rst, which the package explains its errors by, is not here: build in a clone or an sdist"
                )
            for page in self._pages():
                target = Path(self.build_lib, PAGES, Path(page).relative_to("docs"))
                self.mkpath(str(target.parent))
                self.copy_file(page, str(target))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        copied = (
            [] if self.editable_mode else [f"{self.build_lib}/{PAGES}/{Path(p).relative_to('docs')}" for p in self._pages()]
        )
        return [*super().get_outputs(include_bytecode), *copied]


setup(cmdclass={"build_py": WithPages})
