"""What knows a training framework. Only here are frameworks imported, and only when the training program has loaded them."""
