"""The models that are trained: a diffusion transformer, its flow, and a language model.

Attention is `torch.nn.functional.scaled_dot_product_attention` alone, looked up at each call. Nothing here knows data or a run.
"""
