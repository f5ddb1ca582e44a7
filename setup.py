"""Build steps that pyproject.toml cannot say: kernels and default text go into the package.

Both are made inside the source tree (git-ignored) before the Python files are collected; from
there they are package data, for a wheel and for an editable install alike.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

sys.path.insert(0, str(Path(__file__).parent / "src"))

from posttrainllm.errors import PosttrainError
from posttrainllm.kernels.build import compile_builds, host_target
from posttrainllm.kernels.build_wasm import WASM
from posttrainllm.text.datasets import fetch_shakespeare


class BuildAssets(Command):
    """Compile the kernels and fetch the default text.

    Its own command and not an override of build_py: setuptools turns an error in a changed build_py
    into a warning when the install is editable, and the package would be there without kernels.
    """

    description = __doc__
    user_options = []
    editable_mode = False

    def initialize_options(self):
        """Nothing to set."""

    def finalize_options(self):
        """Nothing to check."""

    def run(self):
        """Make what is missing or out of date."""
        try:
            for target in (host_target(), WASM):
                compile_builds(target, report=lambda line: print(f"kernels: {line}", flush=True))
            fetch_shakespeare()
        except PosttrainError as error:
            sys.exit(f"error: {error}")

    def get_source_files(self):
        """The sources are package data already."""
        return []

    def get_outputs(self):
        """The results are package data already."""
        return []

    def get_output_mapping(self):
        """The results are package data already."""
        return {}


class Build(build):
    """The usual build, with the assets first."""

    sub_commands = [("build_assets", None), *build.sub_commands]

    def run(self):
        """Start from an empty folder: a module deleted from the sources must not live on there."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and any Python 3: the libraries are plain C, not extensions."""

    def get_tag(self):
        """Keep the platform, drop the interpreter and its ABI."""
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    """A package that differs from platform to platform."""

    def has_ext_modules(self):
        """Whether there is compiled code; setuptools asks this to choose folder and tag."""
        return True


setup(
    distclass=PlatformDistribution,
    cmdclass={"build": Build, "build_assets": BuildAssets, "bdist_wheel": PlatformWheel},
)
