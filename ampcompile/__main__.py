"""`python -m ampcompile explain | audit | bench | doctor`."""

import sys

from .cli import main

sys.exit(main())
