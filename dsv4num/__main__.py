"""`python -m dsv4num` is the command `dsv4num`."""

from dsv4num.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
