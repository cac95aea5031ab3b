"""Logits-level backends: statistics, and dlogits from cotangents, for logits ``[N, V]`` that already exist.

    backend      file                    the logits are                   dlogits
    reference    reference.py            read as XLA likes                by JAX's own differentiation
    chunked      chunked.py              read in each of two passes       written once, a chunk of rows at a time
    pallas_tpu   pallas_tpu/backend.py   read once (twice: V > 280,000)   written once, over donated logits
    mosaic_gpu   mosaic_gpu/backend.py   read once                        likewise

Every module takes a ``Problem[Given]`` ``p`` (``logitless.core.problem``) over flattened tokens. All but the reference,
which has the first alone, offer

    token_stats(p)                  -> TokenStats [N]
    token_sums(p)                   -> RowSums [N]               a shard of the vocabulary; not mosaic_gpu
    dlogits(p, stats, g)            -> [N, V], dtype of logits   from the statistics and their cotangents
    stats_and_dlogits(p, program)   -> (TokenStats, [N, V])      an uncoupled objective with a unit cotangent

Rows whose ``live`` is false give zero statistics and zero dlogits; live rows whose target is outside
``[0, vocab_size)`` give NaN. Columns at or beyond ``vocab_size`` are padding: no probability, zero gradient.
"""
