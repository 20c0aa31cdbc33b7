"""`ampcompile.watch`: where numbers first left the range of their type in a real run, read without stopping it."""
