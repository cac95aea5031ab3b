"""The fused head on TPU: statistics, the direction of dH, dH and dW from hidden states, with no logits in HBM.

backend          the exact backend around the kernels; which calls it serves, what they cost
kernels          statistics, direction, dH and dW of a problem, each by one sweep: matmuls and maths
forward          the sweep over the vocabulary that makes statistics, the expected head row and column maxima
kept             exponentials that the forward sweep keeps for dW, and how many
backward         the sweep that makes dW; dhidden that of dH
lora             LoRA on the head: narrow matmuls beside the wide ones
rows_at          rows of a [V, H] head or of hidden states, each by a copy of its own
columns_at       W[:, y] of an [H, V] head, and columns of dW put into place
tiles, operands  what a kernel is specialised to, and what it is given
sparse           a sparse backward around the exact backend; sparse_columns finds its columns, slabs works on them,
                 gathered takes them out of a head of either layout, sparse_shard is for a part of the vocabulary
one_pass         the same in one pass over the vocabulary and one over dW, where that serves: look, ordered_slabs, and
                 around, the sweep that writes dW around the rows of the active columns, which are ready
"""
