"""Ready-made scripts for cron.minutely, cron.hourly and the like; ``ftsupervise.cron`` once installed."""
