"""What plan, bench and train share: configuration, child processes, clocks, shapes, dense baselines, result files."""
