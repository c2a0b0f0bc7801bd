"""`python -m liger_models.cli`: the command line without its entry point."""

from liger_models.cli import main

if __name__ == "__main__":
    main()
