"""Phase five, on the joint graph of forward and backward."""
