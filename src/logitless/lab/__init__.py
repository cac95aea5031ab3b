"""The command line and its tools: gradcheck, bench, plan, TPU compiler, report, demo."""
