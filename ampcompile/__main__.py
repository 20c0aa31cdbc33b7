"""`python -m ampcompile bench | doctor`."""

import sys

from ampcompile.command_line.main import main

sys.exit(main())
