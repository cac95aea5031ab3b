"""The sparse backward: the algorithm in plain JAX, and what every sparse backend shares.

backend          the backward around a backend that sweeps over chunks
active_columns   which columns carry a gradient, and what a set of them costs
column_gather    the backward over a gathered set of columns, and what a row may leave out
lse_guess        what is known of a row's logsumexp before its logits are
token_order      tokens with a gradient first
report           what a sparse backward left out, as metrics
"""
