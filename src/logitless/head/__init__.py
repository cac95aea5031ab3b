"""Head-level backends: the same statistics from hidden states and the lm_head, without ``[N, V]`` logits."""
