import sys

from imbrex.cli import main

if __name__ == "__main__":
    sys.exit(main())
