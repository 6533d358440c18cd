"""The FFN role: the native worker that holds the weights, one layer's computation, and the server around it."""
