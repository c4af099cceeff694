"""The one pass over two tensors' bytes that gives every sum a comparison needs."""
