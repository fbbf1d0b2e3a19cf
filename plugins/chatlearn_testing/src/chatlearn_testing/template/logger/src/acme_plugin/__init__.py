"""Logger acme for ChatLearn: metrics as StatsD gauges over UDP."""
