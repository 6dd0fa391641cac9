"""The model on the CPU: files, weights, packed linear layers and the forward pass of the Llama family."""
