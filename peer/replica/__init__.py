"""The computation of a peer: the model, its inner loop and its memory.

It knows the data as batches and the slow weights as a flat vector. It knows no network, no swarm and no training loop.

Reading order: model.py and model_source.py, attention.py, inner_loop.py, optimizer.py, offload.py (AdamW on the host),
averaging.py (the mean of several replicas), memory.py (an estimate), pretrained_tokenizer.py; sharded/ for a peer of
several GPUs.
"""
