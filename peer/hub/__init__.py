"""The Hugging Face hub: how large a download is, whether this machine may push to a repository, and the push.

It knows names, sizes and files, and no model. The token is huggingface_hub's affair: from HF_TOKEN or ``hf auth
login``. Nothing here keeps it, logs it or hands it on.

Reading order: answers.py (every call has a deadline, every error is one line), size.py, push.py, beside.py (pushes
beside training).
"""
