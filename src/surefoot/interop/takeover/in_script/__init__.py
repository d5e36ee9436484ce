"""What runs in the user's own Python, beside a training script. It may not import surefoot, which need not be there."""
