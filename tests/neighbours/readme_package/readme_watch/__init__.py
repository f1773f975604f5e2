"""A watchdog and a receiver for ftsupervise, in a package of their own."""
