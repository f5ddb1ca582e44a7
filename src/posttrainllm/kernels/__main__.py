"""``python -m posttrainllm.kernels``: compile what is not up to date (``make kernels``)."""

from __future__ import annotations

import argparse
import sys

from posttrainllm.errors import EngineError
from posttrainllm.kernels.build import compile_builds, host_target
from posttrainllm.kernels.build_wasm import WASM


def main() -> int:
    """Compile the builds that were asked for, those of this machine first."""
    parser = argparse.ArgumentParser(prog="posttrainllm.kernels", description=__doc__)
    parser.add_argument("builds", nargs="*", help="plain, avx2, avx512, wasm32, ... (default: all)")
    parser.add_argument("--force", action="store_true", help="compile even what is up to date")
    parser.add_argument("--prefix", default="kernels", help="first word of each line of output")
    parser.add_argument("--no-warnings", action="store_true", help="hide the compiler's warnings")
    arguments = parser.parse_args()

    def report(line: str) -> None:
        print(f"{arguments.prefix}: {line}", flush=True)

    def warn(text: str) -> None:
        if not arguments.no_warnings:
            report(text)

    try:
        targets = (host_target(), WASM)
        known = [build for target in targets for build in target.processors]
        odd = [build for build in arguments.builds if build not in known]
        if odd:
            raise EngineError(f"there is no kernel build '{odd[0]}'", f"builds: {', '.join(known)}")
        for target in targets:
            chosen = [build for build in arguments.builds if build in target.processors]
            if chosen or not arguments.builds:
                compile_builds(
                    target, builds=chosen, force=arguments.force, report=report, warn=warn
                )
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
