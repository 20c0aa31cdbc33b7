"""Where the time of a step goes, and what limits it: `profile_step`. It measures only when it is asked to."""
