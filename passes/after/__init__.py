"""Phase five: passes on the joint graph of forward and backward."""
