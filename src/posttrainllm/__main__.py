"""``posttrainllm``, also as ``python -m posttrainllm``: the process, around ``cli.main``."""

import os
import sys


def main() -> int:
    """Run the process's own command line and return its exit code."""
    try:
        from posttrainllm.interrupts import Interrupts

        interrupts = Interrupts()
    except KeyboardInterrupt:
        os.write(2, b"stopped\n")
        os._exit(130)
    from posttrainllm.cli import main as run  # which takes a while

    code = run(interrupts=interrupts)
    interrupts.end(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
