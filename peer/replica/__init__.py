"""What computes: the model, its inner loop, its device and its memory.

It knows the data as batches and the slow weights as a flat vector. It knows no network, no swarm and no training loop.

Reading order: model.py and model_source.py, inner_loop.py, device.py, averaging.py (the mean of several replicas),
memory.py (how much a peer needs), pretrained_tokenizer.py; sharded/ for a peer of several GPUs.
"""
