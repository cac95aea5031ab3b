"""The fused head on TPU: statistics, the direction of dH, dH and dW from hidden states, with no logits in HBM.

backend          the exact backend around the kernels; which calls it serves, what they cost
kernels          statistics, direction, dH and dW of a problem, each by one sweep: matmuls and maths
forward          the sweep over the vocabulary that makes statistics, the expected head row and column maxima
kept_exponentials  exponentials that the forward sweep keeps for dW, and how many
dweight          the sweep that makes dW; dhidden that of dH
lora             LoRA on the head: narrow matmuls beside the wide ones
gather_rows      rows of a [V, H] head or of hidden states, each by a copy of its own
gather_columns   W[:, y] of an [H, V] head
tiles, operands  what a kernel is specialised to, and what it is given
sparse           a sparse backward around the exact backend, and which calls it serves
column_choice    which columns carry the gradient, from the forward sweep's column maxima
sparse_backward  gradients over the active columns of all tokens, and of the hard rows
hard_rows        the sweep that writes dW, merges the rows of the active columns, makes dH of the hard rows
active_rows      rows of dW of the active columns: how the hard rows' sweep puts them in place
"""
