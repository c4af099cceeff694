"""The command line, as `python -m parity`."""

from parity.cli.main import main

if __name__ == "__main__":
    main()
