"""Logits-level backends: statistics, and dlogits from cotangents, for logits ``[N, V]`` that already exist.

Every backend module offers the same three functions over flattened tokens (see ``reference.py`` for their contract):

    token_stats(logits, targets, transform, vocab_size, live)                      -> TokenStats [N]
    dlogits(logits, targets, transform, vocab_size, live, stats, cotangents)       -> [N, V], dtype of logits
    stats_and_dlogits(logits, targets, transform, vocab_size, live, program)       -> (TokenStats, [N, V])

Rows whose ``live`` is false give zero statistics and zero dlogits; live rows whose target is outside
``[0, vocab_size)`` give NaN. Columns at or beyond ``vocab_size`` are padding: no probability, zero gradient.
"""
