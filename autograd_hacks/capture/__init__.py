"""What hooks leave behind: the calls of a forward pass, and the gradients that backward passes bring.  No mathematics."""
