"""What plan, tpu, bench and train share.

command_config  a dataclass, a YAML file and ``key=value`` on top
shapes          model shapes by name, and batches for them
baselines       the dense losses that people write today, naive and strong
child           processes that answer a JSON line with a JSON line
timing          three clocks of a compiled function, and its memory by the compiler
result_files    result files of every command, read back
compiled        where compiled programs are kept for the next process
progress        how far a command is: a bar, or lines
text            lines of 80 columns
tracking        where results go: JSON lines, Weights & Biases
"""
