"""The fused head on TPU: statistics, the direction of dH, dH and dW from hidden states, with no logits in HBM.

backend          the exact backend around the kernels: served calls and costs
kernels          statistics, direction, dH and dW for a problem, a sweep each: matmuls and maths
forward          the vocabulary sweep for statistics, expected head row and column maxima
kept_exponentials  exponentials kept by the forward sweep for dW
dweight          the sweep for dW; dhidden: the sweep for dH
lora             LoRA on the head: narrow matmuls next to the wide matmuls
gather_rows      rows of a [V, H] head or of hidden states, by a copy per row
gather_columns   W[:, y] of an [H, V] head
tiles, operands  static choices of a kernel, and kernel inputs
sparse           a sparse backward around the exact backend: served calls
column_choice    active columns, from the forward sweep's column maxima
sparse_backward  gradients over the active columns for all tokens, and for the hard rows
hard_rows        the sweep that writes dW, merges rows for active columns, and makes dH for hard rows
active_rows      rows of dW for active columns, stored by the hard rows' sweep
"""
