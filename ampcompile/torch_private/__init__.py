"""What of torch is private, or differs between 2.11 and 2.15. Imports nothing of ours but `errors` and `dtypes`."""
