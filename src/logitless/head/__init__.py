"""The fused LM head: statistics, loss, dH and dW from hidden states, without ``[B, T, V]`` logits.

M is one matmul over all tokens that count, K the active columns of a sparse backward, C a chunk of tokens.

    backend      file                    matmuls (in forward / later)   beside inputs and outputs
    reference    reference.py            3 M                            [N, V] logits and dlogits
    chunked      chunked.py              3 M / 4 M                      [C, V] logits, dlogits; dW in float32
    slabs        column_slabs.py         - / 6 M, both heads            [C, S] logits of S columns; [N, H] float32
    mosaic_gpu   mosaic_gpu/backend.py   3 M / 4 M, statistics 1 M      [C, V] logits; dx [N, V] or dW in float32
    pallas_tpu   pallas_tpu/backend.py   - / 4 M, 5 M with entropy      no logits; [N, H] float32
    sparse       sparse/backend.py       M + 2 K/V M / M + 3 K/V M      plus a slab of K columns
    sparse, TPU  pallas_tpu/sparse.py    M + 3 K/V M / M + 4 K/V M      no logits; a slab of K columns, [N, H] float32
    screened     mosaic_gpu/sparse.py    M + K/V M / M + 4 K/V M        no logits; N V bits, dx of some columns, rows

    linear.py    the head as a linear map: logits, dH, dW, LoRA, precision
    sparse/      the sparse backward in plain JAX, and what every sparse backend shares

A backend that is not asked for is not imported (``core/registry.py``).
"""
