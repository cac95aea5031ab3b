"""Write the small models and the logits that ``transformers`` computes with them, which test_train_weights.py checks.

    pip install torch transformers && python tests/support/files/make_hf_golden.py

Qwen2 with biases, grouped heads and a tied head, in one file; Llama with an untied head, in shards. The second row is
padded on the left.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
SHAPE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attn_implementation="eager",
)


def main() -> None:
    """Both folders, from fixed seeds."""
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    qwen2 = transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True, rms_norm_eps=1e-6, rope_parameters=rope)
    write("hf_qwen2", qwen2, "1GB")
    write("hf_llama", transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False, rms_norm_eps=1e-5), "40KB")


def write(name: str, config: transformers.PretrainedConfig, shard: str) -> None:
    """One model with all its weights random (norms and biases too, which start at 1 and 0), and its logits."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn_like(weight) * (0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5)
            weight.copy_(noise + (1.0 if key.endswith("norm.weight") else 0.0))
    tokens = torch.randint(0, config.vocab_size, (2, 11))
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[1, :4] = False
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(tokens, attention_mask=valid.long(), position_ids=positions).logits
    model.save_pretrained(HERE / name, max_shard_size=shard)
    (HERE / name / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(HERE / f"{name}.npz", tokens=tokens, valid=valid, logits=logits.numpy())


if __name__ == "__main__":
    main()
