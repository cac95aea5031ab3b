"""The sparse backward: the algorithm in plain JAX, and what every sparse backend shares.

backend          the backward around a backend that sweeps over chunks
active_columns   which columns carry a gradient, what a set of them costs, and the report of what was left out
gather           tokens and columns gathered, and the backward over gathered columns
dx_columns       active columns found from dx, with a teacher
"""
