"""The fused head on TPU: statistics, the direction of dH, dH and dW from hidden states, with no logits in HBM.

backend          the exact backend around the kernels: served calls and costs
kernels          statistics, direction, dH and dW, a sweep each: matmuls and maths
forward          the vocabulary sweep for statistics, expected head row and column maxima
kept_exponentials  exponentials kept by the forward sweep for dW
dweight          dW sweep; dhidden: dH sweep
lora             LoRA on the head: narrow matmuls next to the wide matmuls
gather_rows      rows from a [V, H] head or from hidden states, by a copy per row
gather_columns   W[:, y] of an [H, V] head
tiles, operands  static choices of a kernel, and kernel inputs
sparse           a sparse backward around the exact backend: served calls, gradients over the active columns
column_choice    active columns, from column maxima
hard_rows        the dW sweep: puts ready rows of active columns in place, and makes dH for hard rows
"""
