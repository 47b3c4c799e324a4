"""`python -m acmoe` is `acmoe`."""

from acmoe.cli import main

if __name__ == "__main__":
    main()
