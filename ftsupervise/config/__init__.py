"""``ftsupervise.yaml`` -> a frozen ``Run``. Pure code but for reading the file it is asked to read."""
