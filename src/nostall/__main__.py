"""Entry point of the command line: what has to be done before its packages are imported."""

import os
import sys


def main() -> None:
    """Run :func:`nostall.cli.main`."""
    if os.environ.get("COLUMNS") == "0":  # an unknown width, in which Rich would print nothing
        del os.environ["COLUMNS"]
    try:
        from nostall.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("nostall: interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
