"""The code that knows training frameworks. They are imported here alone, and only when the training program has loaded them."""
