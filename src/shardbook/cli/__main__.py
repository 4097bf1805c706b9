"""`python -m shardbook.cli` is the console command."""

import sys

from shardbook.cli import main

sys.exit(main())
